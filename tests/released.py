"""LTX-2.5 as it is released: names of files and folders, in tiny or empty files of full size.

A distilled transformer is the dev one with the distilled LoRA merged, so that dev with the LoRA and
the distilled one make the same clip. The forms in fewer bits are of that file's numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ltx2rt.graph.encodings import E2M1, rotation
from ltx2rt.instruments.make import make_checkpoint
from ltx2rt.weights.checkpoint import BLOCK_MATRIX, open_checkpoint
from ltx2rt.weights.files import TensorFile, TensorInfo, write_arrays, write_tensors
from ltx2rt.weights.lora.file import MergedSource, open_lora
from ltx2rt.weights.names import to_diffusers
from ltx2rt.weights.quant.formats import HEADER
from tests.gguf_files import arrays_of

LORA = "ltx-2.5-22b-distilled-lora-450-bf16.safetensors"
IC_LORA = "loras/ltx-2.5-22b-ic-lora"
TEXT = "text_encoders/gemma4-12b-with-proj-ltx-2.5"
DIT = "diffusion_models/ltx-2.5-22b-{}-transformer-{}.safetensors"
FORMS = {"bf16": "bf16", "int8": "comfy-int8-convrot", "nvfp4": "nvfp4"}  # ends of names
FILES = {  # by word
    **{f"{kind} {form}": DIT.format(kind, end)
       for kind in ("distilled", "dev") for form, end in FORMS.items()},
    "text": f"{TEXT}-bf16.safetensors", "text int8": f"{TEXT}-comfy-int8-convrot.safetensors",
    "vae": "vae/ltx-2.5-video-vae-bf16.safetensors",
    "conv": "vae/ltx-2.5-video-vae-conv-bf16.safetensors",
    "audio": "vae/ltx-2.5-audio-vae-bf16.safetensors",
    "spatial": "latent_upscale_models/ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0.safetensors",
    "temporal": "latent_upscale_models/ltx-2.5-latent-temporal-upscaler-x2-bf16-1.0.safetensors",
    "duration": "model_patches/ltx-2.5-duration-head-bf16.safetensors",
    "lora": f"loras/{LORA}",
    "upscaler": f"{IC_LORA}-pixel-spatial-upscaler-x2-1.0.safetensors",
    "ingredients": f"{IC_LORA}-ingredients-0.9.safetensors",
    "hdr": f"{IC_LORA}-hdr-1.0.safetensors", "dubit": f"{IC_LORA}-dubit-1.0.safetensors",
}  # fmt: skip
MADE = {  # what `weights make` calls the plain files
    "dev bf16": "transformer", "text": "text-encoder", "vae": "video-vae", "conv": "video-vae-conv",
    "audio": "audio-vae", "spatial": "spatial-upsampler-x2", "temporal": "temporal-upsampler-x2",
    "duration": "duration-head", "lora": "distilled-lora",
    "upscaler": "ic-lora-pixel-spatial-upscaler-x2", "ingredients": "ic-lora-ingredients",
    "hdr": "ic-lora-hdr", "dubit": "ic-lora-dubit",
}  # fmt: skip
# What everyone has beside a transformer: without the LoRA, which dev needs.
BASE = ("text", "vae", "conv", "audio", "spatial", "temporal", "duration")


def path_of(word: str) -> str:
    """The released name; "dev" and "distilled" are the bfloat16 files."""
    return FILES.get(word) or FILES[f"{word} bf16"]


def folder_of(everything: Path, out: Path, *words: str, base: Iterable[str] = BASE) -> Path:
    """A folder with links to released files: those of `base`, and of these words. Any may be
    replaced or removed."""
    for name in map(path_of, (*base, *words)):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).symlink_to((everything / name).resolve())
    return out


def make_released(out: Path, preset: str = "tiny-2.5", empty: bool = False) -> Path:
    """Every file of the release under its name, from weights of a preset. empty: headers of sparse
    files."""
    make_checkpoint(preset, "official", out / "made", empty=empty, ic_lora=True)
    for word, suffix in MADE.items():
        (out / FILES[word]).parent.mkdir(parents=True, exist_ok=True)
        (out / "made" / f"{preset}-{suffix}.safetensors").rename(out / FILES[word])
    (out / "made").rmdir()
    dev, distilled = out / FILES["dev bf16"], out / FILES["distilled bf16"]
    if empty:
        os.link(dev, distilled)
    else:
        merged = merged_arrays(dev, out / FILES["lora"])
        write_arrays(distilled, arrays_of(dev) | merged, TensorFile(dev).metadata)
    for form in ("int8", "nvfp4"):
        for kind in ("dev", "distilled"):
            write_form(form, out / FILES[f"{kind} bf16"], out / FILES[f"{kind} {form}"], empty)
    write_form("int8", out / FILES["text"], out / FILES["text int8"], empty)
    return out


def make_diffusers(out: Path, preset: str = "tiny-2.5", empty: bool = False) -> Path:
    """The repository of diffusers folders: `transformer/` is distilled and `transformer_full/` dev;
    the weights of `diffusion_decoder/` are others than those of the released file."""
    make_checkpoint(preset, "diffusers", out, empty=empty)
    (out / f"{preset}-distilled-lora.safetensors").rename(out / LORA)
    weights = "diffusion_pytorch_model.safetensors"
    shutil.copytree(out / "transformer", out / "transformer_full", copy_function=os.link)
    if not empty:
        file = out / "transformer" / weights
        stages = 0  # only the video VAE's names need them
        merged = merged_arrays(out / "model_index.json", out / LORA)
        merged = {to_diffusers("transformer", name, stages): x for name, x in merged.items()}
        write_arrays(file, arrays_of(file) | merged, TensorFile(file).metadata)
        file = out / "diffusion_decoder" / weights
        moved = {
            name: x * x.dtype.type(1.5) for name, x in arrays_of(file).items() if "qkv" in name
        }
        write_arrays(file, arrays_of(file) | moved, TensorFile(file).metadata)
    scheduler = out / "scheduler" / "scheduler_config.json"
    said = json.loads(scheduler.read_text())
    said |= {"use_dynamic_shifting": False, "shift_terminal": None}
    scheduler.write_text(json.dumps(said))
    return out


def merged_arrays(dev: Path, lora: Path) -> dict[str, np.ndarray]:
    """The transformer's tensors that the distilled LoRA changes, with it merged."""
    if dev.suffix == ".json":
        source: Any = open_checkpoint(dev.parent).source("transformer")
    else:
        source = TensorFile(dev)
    merged = MergedSource(source, [open_lora(lora)], "bfloat16")
    return {name: merged.read(name).astype(ml_dtypes.bfloat16) for name in merged.touched()}


def write_form(form: str, plain: Path, out: Path, empty: bool) -> None:
    """A file with each matrix of its blocks in the form, and all else as it is."""
    file, group = TensorFile(plain), 256 if empty else 16
    infos = {name: file.info(name) for name in file.names()}
    chosen = [name for name in infos if _is_matrix(name) and len(infos[name].shape) == 2]
    said = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    said = said if form == "int8" else {"format": "nvfp4"}
    if not empty:
        arrays = arrays_of(plain)
        for name in chosen:
            stem, matrix = name.removesuffix("weight"), arrays.pop(name).astype(np.float32)
            fields = int8(matrix, group) if form == "int8" else nvfp4(matrix)
            fields["comfy_quant"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
            arrays |= {stem + child: array for child, array in fields.items()}
        write_arrays(out, arrays, file.metadata)
        return
    for name in chosen:
        stem, (rows, columns) = name.removesuffix("weight"), infos.pop(name).shape
        infos |= {stem + child: info for child, info in _infos(form, rows, columns).items()}
    layers = {name.removesuffix(".weight"): said for name in chosen}
    write_tensors(out, infos, None, file.metadata | {HEADER: json.dumps({"layers": layers})})


def _is_matrix(name: str) -> bool:
    """Whether the forms in fewer bits change it: of blocks, also of connectors and of Gemma."""
    block = BLOCK_MATRIX.search(name.replace("transformer_1d_blocks", "transformer_blocks"))
    return bool(block) or (name.endswith("_proj.weight") and ".layers." in name)


def _infos(form: str, rows: int, columns: int) -> Mapping[str, TensorInfo]:
    f32, e4m3 = np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3fn)
    if form == "int8":
        weight = TensorInfo((rows, columns), np.dtype(np.int8))
        return {"weight": weight, "weight_scale": TensorInfo((rows, 1), f32)}
    tiles = (-(-rows // 128) * 128, -(-columns // 64) * 4)
    return {
        "weight": TensorInfo((rows, columns // 2), np.dtype(np.uint8)),
        "weight_scale": TensorInfo(tiles, e4m3),
        "weight_scale_2": TensorInfo((), f32),
    }


def int8(matrix: np.ndarray, group: int) -> dict[str, np.ndarray]:
    """Rows that are rotated by groups of inputs, as whole numbers times a scale."""
    turned = matrix.reshape(len(matrix), -1, group) @ rotation(group)
    turned = turned.reshape(matrix.shape)
    scale = np.maximum(np.abs(turned).max(1, keepdims=True), 1e-12) / np.float32(127)
    return {"weight": np.rint(turned / scale).astype(np.int8), "weight_scale": scale}


def nvfp4(matrix: np.ndarray) -> dict[str, np.ndarray]:
    """Groups of 16 inputs as numbers of four bits times a scale of eight, in tiles of 128 x 4."""
    rows, columns = matrix.shape
    whole = np.float32(np.abs(matrix).max() / 2688)
    groups = matrix.reshape(rows, -1, 16) / whole
    scale = (np.abs(groups).max(2) / 6).astype(ml_dtypes.float8_e4m3fn)
    near = groups / np.maximum(scale.astype(np.float32), 1e-6)[..., None]
    codes = np.abs(near[..., None] - np.float32(E2M1)).argmin(-1).astype(np.uint8)
    codes = codes.reshape(rows, columns)
    down, right = -(-rows // 128), -(-columns // 64)
    tiles = np.zeros((128 * down, 4 * right), scale.dtype)
    tiles[:rows, : scale.shape[1]] = scale
    tiles = tiles.reshape(down, 4, 32, right, 4).transpose(0, 3, 2, 1, 4)
    return {
        "weight": codes[:, ::2] << 4 | codes[:, 1::2],
        "weight_scale": tiles.reshape(128 * down, 4 * right),
        "weight_scale_2": np.array(whole),
    }
