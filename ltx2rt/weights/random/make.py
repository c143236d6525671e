"""Random but well-scaled checkpoints in the real layouts: `ltx2rt weights make`.

Decides values and files. Which tensors there are is read off the graphs; only tensors that no graph reads are listed
here. A tensor's values depend on the seed and its name alone, so both layouts hold the same weights.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt import __version__
from ltx2rt.config import GemmaConfig, ModelConfig
from ltx2rt.errors import InputError
from ltx2rt.graph.ops import quantise_rows
from ltx2rt.weights import configs
from ltx2rt.weights.checkpoint import STATISTICS
from ltx2rt.weights.files import DTYPE_NAMES, TensorInfo, write_tensors
from ltx2rt.weights.manifest import Shapes, networks
from ltx2rt.weights.names import component_of, to_diffusers
from ltx2rt.weights.random import filters
from ltx2rt.weights.random.presets import Preset, preset

BF16, F32, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3fn)
TABLE = re.compile(r"scale_shift_table(?:_a2v_ca_(?:video|audio))?$")  # float32 in the released files, all else bf16
BLOCK_WEIGHT = re.compile(r"model\.diffusion_model\.transformer_blocks\.(\d+)\..*\.weight")
FORWARD_BASIS, INVERSE_BASIS = (f"vocoder.mel_stft.stft_fn.{kind}_basis" for kind in ("forward", "inverse"))
SINGLE_FILE = ("transformer", "text", "video_vae", "audio_vae", "vocoder")
DIFFUSERS_FOLDERS = {
    "transformer": "transformer",
    "text": "connectors",
    "video_vae": "vae",
    "audio_vae": "audio_vae",
    "vocoder": "vocoder",
    "upsampler": "latent_upsampler",
}
DELTA = 0.2  # standard deviation of a LoRA's change, in units of the weight's
# Gains of the last convolutions. With them pixels have a standard deviation near 0.4, and of the waveforms a few
# samples in a hundred pass 1, so that clamping is exercised and does not dominate. Measured at the tiny sizes.
GAINS = {
    "vae.decoder.conv_out.conv.": 0.65,
    "vocoder.conv_post.": 3.0,
    "vocoder.vocoder.conv_post.": 0.05,
    "vocoder.bwe_generator.conv_post.": 0.02,
}
CORPUS = [
    "a robot dancing in the rain while a red fox walks through a snowy forest at dawn",
    "the camera remains static and a man says in an excited voice: 'so good.'",
    "worst quality, inconsistent motion, blurry, jittery, distorted, off-sync audio",
    "A beautiful sunset over the ocean. Waves crash, gulls cry, 24 frames per second!",
]


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: where its values come from, and its form."""

    name: str  # canonical; decides the values
    info: TensorInfo
    quantised: TensorInfo | None = None  # this is the float8 form of such a tensor, or its scale


@dataclass
class Plan:
    """Every file of a checkpoint: tensors by stored name, and texts."""

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # path -> stored name -> tensor
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.tensors[path], self.metadata[path] = dict(tensors), dict(metadata)

    def add_json(self, path: str, data: Mapping[str, Any]) -> None:
        self.texts[path] = json.dumps(data, indent=2) + "\n"

    def manifest(self) -> str:
        """One line per tensor (stored name, shape, dtype), totals per file, per component and overall."""
        lines, total = [], 0
        for path, tensors in self.tensors.items():
            infos = [tensor.info for tensor in tensors.values()]
            size = sum(info.nbytes for info in infos)
            total += size
            lines.append(f"{path}: {len(tensors)} tensors, {sum(prod(i.shape) for i in infos)} elements, {size} bytes")
            lines += [f"  {name}  {list(t.info.shape)}  {DTYPE_NAMES[t.info.dtype]}" for name, t in tensors.items()]
        return "\n".join([*lines, *self.summary(), f"total: {total} bytes"])

    def summary(self) -> list[str]:
        lines = []
        for path, tensors in self.tensors.items():
            modules = sum(name.endswith(".lora_A.weight") for name in tensors)
            lines.append(f"{path}: {len(tensors)} tensors" + (f", {modules} modules" if modules else ""))
            kinds = [component_of(tensor.name) for tensor in tensors.values()]
            if len(set(kinds)) > 1 and not modules:
                lines += [f"  {kind}: {kinds.count(kind)} tensors" for kind in SINGLE_FILE]
        return lines


def make_checkpoint(
    name: str,
    layout: str,
    directory: str | Path,
    seed: int = 0,
    dry_run: bool = False,
    empty: bool = False,
    fp8: bool = False,
) -> str:
    """Write a checkpoint into `directory` (created if need be, which must not hold one of its files already).

    Returns what a person wants to see: the manifest of a dry run, else the files written.
    Peak memory: the largest tensor. empty: all zeros in sparse files, for those who need the headers alone.
    fp8: most blocks' linears in float8 with scales, as the released fp8 files have them.
    """
    if layout not in ("official", "diffusers"):
        raise InputError(f"unknown layout {layout!r}, known are official, diffusers")
    if seed < 0:
        raise InputError(f"seed {seed} is negative; pass one from 0 on")
    if fp8 and layout != "official":
        raise InputError(f"--fp8: such files are of the official layout, not {layout}; leave one out")
    plan = plan_checkpoint(preset(name), name, layout, fp8)
    if dry_run:
        return plan.manifest()
    directory = Path(directory)
    if not empty:
        _check_room(directory, sum(tensor.info.nbytes for file in plan.tensors.values() for tensor in file.values()))
    if existing := [path for path in (*plan.tensors, *plan.texts) if (directory / path).exists()]:
        raise InputError(f"{directory / existing[0]} exists; pass an empty folder")
    for path in (*plan.tensors, *plan.texts):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
    for path, tensors in plan.tensors.items():
        infos = {stored: tensor.info for stored, tensor in tensors.items()}
        produce = None if empty else lambda name, file=tensors: values(file[name], seed)
        write_tensors(directory / path, infos, produce, plan.metadata[path])
    for path, text in plan.texts.items():
        (directory / path).write_text(text)
    return "\n".join(f"{directory / line}" if not line.startswith(" ") else line for line in plan.summary())


def _check_room(directory: Path, needed: int) -> None:
    """The nearest existing folder must be one, and have room."""
    nearest = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise InputError(f"{nearest}: is a file; pass a folder to write the checkpoint into")
    free = shutil.disk_usage(nearest).free
    if free < needed:
        raise InputError(f"{directory}: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; choose another disk")


# ---- which tensors --------------------------------------------------------------------------------------------------


def stored(config: ModelConfig) -> Shapes:
    """What the files hold: each tensor once, and those that are carried along unread."""
    shapes = networks(config)
    for name in STATISTICS:  # the upsampler's graph reads the autoencoder's
        shapes.get("upsampler", {}).pop(name, None)
    if FORWARD_BASIS in shapes["vocoder"]:
        shapes["vocoder"][INVERSE_BASIS] = shapes["vocoder"][FORWARD_BASIS]
    if config.upsampler and config.upsampler.rational:  # at x2 it blurs nothing
        shapes["upsampler"]["upsampler.blur_down.kernel"] = (1, 1, 5, 5)
    return shapes


def lora_tensors(
    config: ModelConfig, shapes: Mapping[str, Mapping[str, tuple[int, ...]]], rank: int
) -> dict[str, Tensor]:
    """Every linear layer of the transformer at rank min(rank, in, out); 2.0's file also changes the text projection."""
    targets = {name: shape for name, shape in shapes["transformer"].items() if name.endswith(".weight")}
    if config.generation == "2.0":
        targets |= {name: s for name, s in shapes["text"].items() if name.startswith("text_embedding_projection.")}
    out = {}
    for name, shape in targets.items():
        if len(shape) != 2:
            continue
        module, own_rank = name.removeprefix("model.").removesuffix(".weight"), min(rank, *shape)
        for half, half_shape in (("lora_A", (own_rank, shape[1])), ("lora_B", (shape[0], own_rank))):
            key = f"{module}.{half}.weight"
            out[key] = Tensor(key, TensorInfo(half_shape, BF16))
    return out


def in_float8(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The linears of the blocks 1 to 42 of 48, as in LTX-2.0's released fp8 file; of fewer, at least of block 1."""
    blocks, out = range(1, max(2, config.transformer.num_layers - 5)), {}
    for key, tensor in tensors.items():
        match = BLOCK_WEIGHT.fullmatch(key)
        if not match or int(match[1]) not in blocks or len(tensor.info.shape) != 2:
            out[key] = tensor
            continue
        out[key] = Tensor(key, TensorInfo(tensor.info.shape, E4M3), tensor.info)
        for scale in ("weight_scale", "input_scale"):
            out[key.removesuffix("weight") + scale] = Tensor(key, TensorInfo((), F32), tensor.info)
    return out


def vision_shapes(vision: Mapping[str, int], text_width: int) -> dict[str, tuple[int, ...]]:
    """The image tower that a Gemma 3 folder carries and a text encoder does not read (Siglip, no head)."""
    width, ff, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    out: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (width, 3, patch, patch),
        "embeddings.patch_embedding.bias": (width,),
        "embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, width),
        "post_layernorm.weight": (width,),
        "post_layernorm.bias": (width,),
    }
    linears = {f"self_attn.{x}_proj": (width, width) for x in ("q", "k", "v", "out")}
    linears |= {"mlp.fc1": (ff, width), "mlp.fc2": (width, ff), "layer_norm1": (width,), "layer_norm2": (width,)}
    for layer in range(vision["num_hidden_layers"]):
        for name, shape in linears.items():
            out[f"encoder.layers.{layer}.{name}.weight"] = shape
            out[f"encoder.layers.{layer}.{name}.bias"] = shape[:1]
    out = {f"vision_tower.{name}": shape for name, shape in out.items()}
    out["multi_modal_projector.mm_input_projection_weight"] = (width, text_width)
    out["multi_modal_projector.mm_soft_emb_norm.weight"] = (width,)
    return out


# ---- which files ----------------------------------------------------------------------------------------------------


def plan_checkpoint(made: Preset, name: str, layout: str, fp8: bool = False) -> Plan:
    config, plan = made.config, Plan()
    assert config.gemma is not None and config.upsampler is not None
    shapes = stored(config)
    version = {"model_version": ".".join(map(str, config.version))}

    def tensors(component: str) -> dict[str, Tensor]:
        return {
            name: Tensor(name, TensorInfo(shape, F32 if TABLE.search(name) else BF16))
            for name, shape in shapes[component].items()
        }

    gemma_dir = "gemma-3" if layout == "official" else "text_encoder"
    vision = _vision(config.gemma)
    shapes["gemma"] |= vision_shapes(vision, config.gemma.hidden_size)
    plan.add(f"{gemma_dir}/model.safetensors", tensors("gemma"), {"format": "pt"})
    plan.add_json(f"{gemma_dir}/config.json", configs.gemma_json(config.gemma, vision))
    tokenizer_dir = gemma_dir if layout == "official" else "tokenizer"
    plan.texts[f"{tokenizer_dir}/tokenizer.json"] = tokenizer_json(config.gemma)
    plan.add_json(f"{tokenizer_dir}/tokenizer_config.json", TOKENIZER_CONFIG)
    lora = {"lora_rank": str(made.lora_rank), "lora_alpha": str(made.lora_rank)} | version
    plan.add(f"{name}-distilled-lora.safetensors", lora_tensors(config, shapes, made.lora_rank), lora)

    if layout == "official":
        whole = {key: tensor for component in SINGLE_FILE for key, tensor in tensors(component).items()}
        metadata = {"config": json.dumps(configs.official_json(config))} | version
        plan.add(f"{name}.safetensors", in_float8(whole, config) if fp8 else whole, metadata)
        flat = {"config": json.dumps(configs.upsampler_json(config.upsampler, "official"))}
        plan.add(f"{name}-spatial-upsampler-x2.safetensors", tensors("upsampler"), flat)
        return plan
    stages = len(config.video_vae.encoder)
    texts = {
        "transformer": configs.diffusers_transformer_json(config.transformer),
        "text": configs.diffusers_text_json(config.text, config.transformer),
        "video_vae": configs.diffusers_video_vae_json(config.video_vae),
        "audio_vae": configs.diffusers_audio_vae_json(config.audio_vae),
        "vocoder": configs.diffusers_vocoder_json(config.vocoder),
        "upsampler": configs.upsampler_json(config.upsampler, "diffusers"),
    }
    for component, folder in DIFFUSERS_FOLDERS.items():
        theirs = {to_diffusers(component, key, stages): tensor for key, tensor in tensors(component).items()}
        plan.add(f"{folder}/diffusion_pytorch_model.safetensors", theirs, {"format": "pt"})
        plan.add_json(f"{folder}/config.json", texts[component])
    plan.add_json("scheduler/scheduler_config.json", SCHEDULER_CONFIG)
    plan.add_json("model_index.json", model_index(texts["vocoder"]["_class_name"]))
    return plan


SCHEDULER_CONFIG = {  # the released one
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 1024,
    "base_shift": 0.95,
    "invert_sigmas": False,
    "max_image_seq_len": 4096,
    "max_shift": 2.05,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.1,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "GemmaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "padding_side": "left",
    "model_max_length": 1024,
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}


def model_index(vocoder_class: str) -> dict[str, Any]:
    return {
        "_class_name": "LTX2Pipeline",
        "_ltx2rt_version": __version__,
        "audio_vae": ["diffusers", "AutoencoderKLLTX2Audio"],
        "connectors": ["ltx2", "LTX2TextConnectors"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Gemma3ForConditionalGeneration"],
        "tokenizer": ["transformers", "GemmaTokenizer"],
        "transformer": ["diffusers", "LTX2VideoTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLLTX2Video"],
        "vocoder": ["ltx2", vocoder_class],
    }


def _vision(config: GemmaConfig) -> dict[str, Any]:
    """The released tower beside the released text model, else the smallest one that loads."""
    released = config.hidden_size == 3840
    sizes = (1152, 4304, 27, 16, 896, 14) if released else (16, 32, 1, 2, 16, 4)
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    return {"model_type": "siglip_vision_model", "vision_use_head": False, **dict(zip(keys, sizes, strict=True))}


def tokenizer_json(config: GemmaConfig) -> str:
    """A small Gemma-style BPE with byte fallback, trained on four sentences."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    special += ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=min(480, config.vocab_size),
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
        min_frequency=2,
        max_token_length=8,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", special.index("<bos>"))]
    )
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    return json.dumps(data, ensure_ascii=False, indent=1) + "\n"


# ---- which values ---------------------------------------------------------------------------------------------------


def values(tensor: Tensor, seed: int) -> np.ndarray:
    """Matrices and convolutions N(0, 1/fan_in); gains near neutral; tables and registers 0.3 N; biases 0.05 N."""
    name, shape = tensor.name, tensor.info.shape
    if tensor.quantised:
        float8, scale = quantise_rows(values(Tensor(name, tensor.quantised), seed).reshape(1, -1))
        return scale.reshape(()) if tensor.info.dtype == F32 else float8.reshape(shape)
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
    elif TABLE.search(name) or leaf == "learnable_registers":
        array *= np.float32(0.3)
    elif leaf == "weight" and len(shape) == 1:
        neutral = 0 if name.startswith("language_model.") else 1  # Gemma's norms multiply by 1 + w
        array = np.float32(neutral) + np.float32(0.1) * array
    elif len(shape) == 1:
        array *= np.float32(0.05)
    elif name.endswith(".lora_B.weight"):
        array *= np.float32(DELTA * shape[1] ** -0.5)
    else:
        array *= np.float32(prod(shape[1:]) ** -0.5)
    gain = next((gain for prefix, gain in GAINS.items() if name.startswith(prefix)), 1.0)
    return (array * np.float32(gain) if gain != 1 else array).astype(tensor.info.dtype)


def _fixed(name: str, shape: Iterable[int]) -> np.ndarray | None:
    shape = tuple(shape)
    if name.endswith("upsample.filter") or name.endswith("downsample.lowpass.filter"):
        return filters.antialias_taps(shape[-1])
    if name.endswith("mel_basis"):
        return filters.mel_basis(shape[0], 2 * (shape[1] - 1), 16000)
    if name.endswith(("forward_basis", "inverse_basis")):
        return filters.stft_basis(shape[-1])
    if name.endswith("blur_down.kernel"):
        return filters.blur_kernel()
    return None
