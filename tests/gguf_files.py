"""Files for tests: linked folders, arrays of a file, and GGUF files that the `gguf` package wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ltx2rt.weights.files import TensorFile, open_file, write_arrays
from ltx2rt.weights.gguf import BLOCKS, BY_NAME
from ltx2rt.weights.names import LLAMA_CPP, component_of
from ltx2rt.weights.part_table import PARTS
from ltx2rt.weights.parts import file_kind

PREFIX = PARTS["transformer"].prefix
BF16 = np.dtype(ml_dtypes.bfloat16)
HALVES = {  # bytes of a block where a float16 is
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
}
NAMES = [block.name for block in BLOCKS.values() if block.read]


def package() -> Any:
    """The `gguf` package; without it the test is skipped."""
    return pytest.importorskip("gguf", reason="the gguf package is not installed")


def linked(folder: Path, out: Path, *without: str) -> Path:
    """A folder with the same files, without some at its top; each may be replaced."""
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if path.is_file() and inner.parts[0] not in without:
            (out / inner).parent.mkdir(parents=True, exist_ok=True)
            (out / inner).symlink_to(path.resolve())
    return out


def arrays_of(
    path: Path, chosen: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """The arrays in a file with these names."""
    file = open_file(path)
    return {name: file.read(name) for name in file.names() if chosen(name)}


def random_blocks(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 [..., bytes of a row] of any bits, but for finite scales; what the K types have no
    packer for."""
    block = BY_NAME[kind]
    found = rng.integers(0, 256, (*shape[:-1], shape[-1] // block.weights, block.size), np.uint8)
    for at in HALVES.get(kind, ()):
        scales = (0.02 * rng.standard_normal(found.shape[:-1])).astype(np.float16)
        found[..., at : at + 2] = scales[..., None].view(np.uint8)
    return found.reshape(*shape[:-1], -1)


def decoded(kind: str, packed: np.ndarray) -> np.ndarray:
    """What the package says that bytes stand for, in float32."""
    gguf = package()
    return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray | tuple[str, np.ndarray]],
    architecture: str = "ltxv",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """tensors: arrays of plain types; or the name of a type and the bytes of its rows."""
    gguf = package()
    writer = gguf.GGUFWriter(path, architecture)
    kinds = {str: "string", bool: "bool", int: "uint32", float: "float32", list: "array"}
    for key, value in (metadata or {}).items():
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[1], raw_dtype=gguf.GGMLQuantizationType[value[0]])
        elif value.dtype == BF16:
            rows = np.ascontiguousarray(value).view(np.uint8).reshape(*value.shape[:-1], -1)
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed(name: str, array: np.ndarray) -> np.ndarray | tuple[str, np.ndarray]:
    """As converters store a tensor: small and one-dimensional ones and tables in float32, matrices
    quantised if their rows are whole blocks, which tiny models' rows are for blocks of 32; every
    second layer's values in another type."""
    wide = array.astype(np.float32)
    if array.ndim != 2 or array.size <= 1024 or name.endswith("scale_shift_table"):
        return array if "learnable_registers" in name or "keyframes" in name else wide
    layer = int((re.search(r"\d+", name) or "0")[0])
    later = layer % 2 * name.endswith(("to_v.weight", "attn_v.weight"))  # as K_M mixes them
    kind = ("Q8_0", "Q4_0", "Q5_1")[(len(name) + later) % 3]
    if array.shape[1] % 32:
        return array
    gguf = package()
    return kind, gguf.quants.quantize(wide, gguf.GGMLQuantizationType[kind])


def numbers(stored: np.ndarray | tuple[str, np.ndarray]) -> np.ndarray:
    """What a stored tensor is read as."""
    return decoded(*stored) if isinstance(stored, tuple) else stored


def take_apart(
    folder: Path, out: Path, prefix: str = "", store: Callable[[str, np.ndarray], Any] = packed
) -> tuple[Path, Path]:
    """A folder of tiny-2.x official files as ComfyUI users have one, in `out/gguf`, and its copy
    without GGUF in `out/plain`: transformer, connectors, video VAE and audio VAE in files of their
    own. prefix: of the names in the GGUF file. The copy holds the numbers that the GGUF file's
    blocks stand for."""
    files = map(TensorFile, folder.glob("*.safetensors"))
    file = next(file for file in files if file_kind(file) == "main")
    main, parts = file.path, {}
    for name, array in arrays_of(main).items():
        part = str(component_of(name))
        parts.setdefault({"vocoder": "audio_vae"}.get(part, part), {})[name] = array
    ggufs, plain = (linked(folder, out / kind, main.name) for kind in ("gguf", "plain"))
    for one in (ggufs, plain):
        for part in ("text", "video_vae", "audio_vae"):
            if part in parts:
                write_arrays(one / f"{part}.safetensors", parts[part], file.metadata)
    stored = {name: store(name, array) for name, array in parts["transformer"].items()}
    named = {prefix + name.removeprefix(PREFIX): value for name, value in stored.items()}
    write_gguf(ggufs / "transformer.gguf", named)
    wide = {name: numbers(value) for name, value in stored.items()}
    write_arrays(plain / "transformer.safetensors", wide, file.metadata)
    return ggufs, plain


def gemma_names(names: list[str]) -> dict[str, str]:
    """llama.cpp's name of each of Gemma's tensors, by canonical name."""
    back = {theirs: ours for ours, theirs in LLAMA_CPP.items()}
    found = {}
    for name in names:
        word = name.removeprefix("language_model.model.").removesuffix(".weight")
        block, word = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)", word).groups()
        found[name] = f"{f'blk.{block}.' if block else ''}{back[word]}.weight"
    return found


def gemma_keys(config) -> dict[str, object]:
    """Metadata of a Gemma 3, as llama.cpp writes it."""
    return {
        "gemma3.embedding_length": config.hidden_size,
        "gemma3.block_count": config.num_layers,
        "gemma3.feed_forward_length": config.intermediate_size,
        "gemma3.attention.head_count": config.num_heads,
        "gemma3.attention.head_count_kv": config.num_kv_heads,
        "gemma3.attention.key_length": config.head_dim,
        "gemma3.attention.sliding_window": config.sliding_window,
        "gemma3.attention.layer_norm_rms_epsilon": config.norm_eps,
        "gemma3.rope.freq_base": config.rope_theta,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": config.rope_scaling_factor,
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>"],
    }
