"""Random tensors: which ones a checkpoint has, and their values.

Which tensors there are is read off the graphs; only tensors that no graph reads are listed here. A
tensor's values depend on the seed and its name alone, so both layouts hold the same weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np

from ltx2rt.config import Gemma4Config, ModelConfig
from ltx2rt.graph import encodings
from ltx2rt.graph.encodings import quantise_rows
from ltx2rt.instruments import filters
from ltx2rt.models.mel import mel_basis
from ltx2rt.weights.audit import Shapes, networks
from ltx2rt.weights.configs import gemma4, transformer
from ltx2rt.weights.files import TensorInfo
from ltx2rt.weights.names import GEMMA, rows_of
from ltx2rt.weights.part_table import PARTS

BF16, F32, U8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.uint8)
E4M3 = np.dtype(encodings.E4M3)
# float32 in the released files, all else bf16
TABLE = re.compile(r"scale_shift_table(?:_a2v_ca_(?:video|audio))?$")
BLOCK_WEIGHT = re.compile(r"model\.diffusion_model\.transformer_blocks\.(\d+)\..*\.weight")
FORWARD_BASIS, INVERSE_BASIS = (
    f"vocoder.mel_stft.stft_fn.{kind}_basis" for kind in ("forward", "inverse")
)
DELTA = 0.2  # standard deviation of a LoRA's change, in units of the weight's
# Gains of the last layers. With them pixels have a standard deviation near 0.4, and of the
# waveforms a few samples in a hundred pass 1, so that clamping is exercised and does not dominate.
# Measured at the tiny sizes.
GAINS = {name: gain for part in PARTS.values() for name, gain in part.gains.items()}


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: the source of its values, and its form."""

    name: str  # canonical; decides the values
    info: TensorInfo
    # index and number of equal parts, where it is one part of the named tensor's rows
    part: tuple[int, int] | None = None
    data: bytes | None = None  # a file's, in place of values
    quantised: TensorInfo | None = None  # the full-precision tensor that this one is a form of


def stored(config: ModelConfig, layout: str = "official") -> Shapes:
    """Return the tensors of the files by component, unread ones included."""
    shapes = networks(config)
    for component, held in shapes.items():
        part = PARTS[component]
        for name in part.borrowed:
            held.pop(name, None)
        held |= part.unread(config.part(component), layout)
    if config.transformer.keyframe_vector:
        shapes["transformer"][transformer.KEYFRAME_VECTOR] = (1, config.transformer.width)
    if FORWARD_BASIS in shapes["vocoder"]:
        shapes["vocoder"][INVERSE_BASIS] = shapes["vocoder"][FORWARD_BASIS]
    return shapes


def lora_tensors(
    config: ModelConfig, shapes: Shapes, rank: int, part: str = ""
) -> dict[str, Tensor]:
    """Every linear of the transformer at rank min(rank, in, out), with 2.0's text projection. part:
    of the names of those that are changed, for all of them empty."""
    targets = {
        n: x for n, x in shapes["transformer"].items() if n.endswith(".weight") and part in n
    }
    if config.release.lora_changes_text and not part:
        first = "text_embedding_projection."
        targets |= {n: shape for n, shape in shapes["text"].items() if n.startswith(first)}
    out = {}
    for name, shape in targets.items():
        if len(shape) != 2:
            continue
        module, own_rank = name.removeprefix("model.").removesuffix(".weight"), min(rank, *shape)
        for half, sizes in (("A", (own_rank, shape[1])), ("B", (shape[0], own_rank))):
            key = f"{module}.lora_{half}.weight"
            out[key] = Tensor(key, TensorInfo(sizes, BF16))
    return out


def in_fp8(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Blocks 1 to 42 of 48 in e4m3, as in LTX-2.0's released file; of fewer at least one."""
    blocks, out = range(1, max(2, config.transformer.num_layers - 5)), {}
    for key, tensor in tensors.items():
        match = BLOCK_WEIGHT.fullmatch(key)
        if not match or int(match[1]) not in blocks or len(tensor.info.shape) != 2:
            out[key] = tensor
            continue
        out[key] = Tensor(key, TensorInfo(tensor.info.shape, E4M3), quantised=tensor.info)
        for scale in ("weight_scale", "input_scale"):
            own = Tensor(key, TensorInfo((), F32), quantised=tensor.info)
            out[key.removesuffix("weight") + scale] = own
    return out


def vision_shapes(vision: Mapping[str, int], text_width: int) -> dict[str, tuple[int, ...]]:
    """The image tower of a Gemma 3 folder, which no text encoder reads (Siglip, no head)."""
    width, ff, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    out: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (width, 3, patch, patch),
        "embeddings.patch_embedding.bias": (width,),
        "embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, width),
        "post_layernorm.weight": (width,),
        "post_layernorm.bias": (width,),
    }
    linears = {f"self_attn.{x}_proj": (width, width) for x in ("q", "k", "v", "out")}
    linears |= {"mlp.fc1": (ff, width), "mlp.fc2": (width, ff)}
    linears |= {"layer_norm1": (width,), "layer_norm2": (width,)}
    for layer in range(vision["num_hidden_layers"]):
        for name, shape in linears.items():
            out[f"encoder.layers.{layer}.{name}.weight"] = shape
            out[f"encoder.layers.{layer}.{name}.bias"] = shape[:1]
    out = {f"vision_tower.{name}": shape for name, shape in out.items()}
    out["multi_modal_projector.mm_input_projection_weight"] = (width, text_width)
    out["multi_modal_projector.mm_soft_emb_norm.weight"] = (width,)
    return out


def tensors_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {
        name: Tensor(name, TensorInfo(shape, F32 if TABLE.search(name) else BF16))
        for name, shape in shapes.items()
    }


def gemma4_tensors(
    gemma: Gemma4Config,
    shapes: Mapping[str, tuple[int, ...]],
    prefix: str,
    towers: Mapping[str, str],
) -> dict[str, Tensor]:
    """Tensors of the text branch under `prefix`, and the towers that no network reads."""
    vision, sound = gemma4.towers_json(gemma).values()
    width = gemma.hidden_size
    patch = 3 * (vision["patch_size"] * vision["pooling_kernel_size"]) ** 2
    tower: dict[str, tuple[int, ...]] = {
        f"vision_model.{name}.{leaf}": (patch if name == "patch_ln1" else width,)
        for name in ("patch_ln1", "patch_dense", "patch_ln2", "pos_norm")
        for leaf in ("weight", "bias")
    }
    tower |= {
        "vision_model.patch_dense.weight": (width, patch),
        "vision_model.pos_embedding": (vision["mm_posemb_size"], 2, width),
        "multi_modal_projector.embedding_projection.weight": (width, width),
        "audio_projector.embedding_projection.weight": (width, sound["audio_embed_dim"]),
    }
    shapes = {name.replace(GEMMA, "model."): shape for name, shape in shapes.items()} | tower

    def renamed(name: str) -> str:
        first, _, rest = name.partition(".")
        return f"{prefix if first == 'model' else towers[first]}{rest}"

    return {renamed(name): tensor for name, tensor in tensors_of(shapes).items()}


def split_rows(component: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """diffusers has the projections of some attentions apart."""
    for name, tensor in tensors.items():
        parts = rows_of(component, name)
        rows, *rest = tensor.info.shape or (0,)
        info = TensorInfo((rows // 3, *rest), tensor.info.dtype)
        for i, part in enumerate(parts):
            yield part, Tensor(tensor.name, info, part=(i, len(parts)))
        if not parts:
            yield name, tensor


HF_TOWERS = {
    "vision_model": "model.vision_embedder.",
    "multi_modal_projector": "model.embed_vision.",
    "audio_projector": "model.embed_audio.",
}
FLAT_TOWERS = {name: f"{name}." for name in HF_TOWERS}


def values(tensor: Tensor, seed: int) -> np.ndarray:
    """Matrices and convolutions N(0, 1/fan_in); gains near neutral; tables and registers 0.3 N;
    biases 0.05 N."""
    if tensor.data is not None:
        return np.frombuffer(tensor.data, np.uint8)
    name, shape = tensor.name, tensor.info.shape
    if tensor.part is not None:
        i, count = tensor.part
        info = TensorInfo((count * shape[0], *shape[1:]), tensor.info.dtype)
        whole = values(Tensor(name, info), seed)
        return whole[i * shape[0] : (i + 1) * shape[0]]
    if tensor.quantised:
        exact = values(Tensor(name, tensor.quantised), seed)
        quantised, scale = quantise_rows(exact.reshape(1, -1))
        return scale.reshape(()) if tensor.info.dtype == F32 else quantised.reshape(shape)
    fixed = _fixed(name, shape)
    if fixed is not None:
        return np.broadcast_to(fixed, shape).astype(np.float32).astype(tensor.info.dtype)
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    noise = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    leaf = name.rsplit(".", 1)[-1]
    if name.endswith("std-of-means"):
        return (0.5 + noise.random(shape, np.float32)).astype(tensor.info.dtype)
    array = noise.standard_normal(shape, np.float32)
    if leaf in ("alpha", "beta"):  # logarithms of a snake activation's parameters
        array *= np.float32(0.1)
    elif leaf == "mean-of-means":
        array *= np.float32(0.2)
    elif TABLE.search(name) or leaf in ("learnable_registers", "keyframes_abs_pos_embedding"):
        array *= np.float32(0.3)
    elif leaf in ("weight", "layer_scalar") and len(shape) == 1:
        # Gemma 3's norms multiply by 1 + w
        neutral = 0 if name.startswith("language_model.") else 1
        array = np.float32(neutral) + np.float32(0.1) * array
        if name.startswith("model.layers.") and name.endswith(("q_norm.weight", "k_norm.weight")):
            # Gemma 4 scales no scores: the norms' weights do
            array *= np.float32(shape[0] ** -0.25)
    elif len(shape) == 1:
        array *= np.float32(0.05)
    elif name.endswith(".lora_B.weight"):
        array *= np.float32(DELTA * shape[1] ** -0.5)
    else:
        array *= np.float32(prod(shape[1:]) ** -0.5)
    gain = next((gain for prefix, gain in GAINS.items() if name.startswith(prefix)), 1.0)
    return (array * np.float32(gain) if gain != 1 else array).astype(tensor.info.dtype)


def _fixed(name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    if name.endswith(("upsample.filter", "downsample.lowpass.filter")):
        return filters.antialias_taps(shape[-1])
    if name.endswith("mel_basis"):
        return mel_basis(shape[0], 2 * (shape[1] - 1), 16000)
    if name.endswith(("forward_basis", "inverse_basis")):
        return filters.stft_basis(shape[-1])
    if name.endswith("blur_down.kernel"):
        return filters.blur_kernel()
    return None
