"""ComfyUI's folders: where it keeps which files, and which of hundreds may be of LTX-2.

Decides which files are looked into, by bytes of their headers, which takes about a millisecond
each. What a file is, `parts` decides. Source of the names: ComfyUI's folder_paths.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ltx2rt.errors import InputError
from ltx2rt.text_files import read_text
from ltx2rt.weights.files import GGUF, MAX_HEADER_BYTES, WEIGHTS, visible
from ltx2rt.weights.part_table import JOINT, PARTS, TEXT_PROJECTION

FOLDERS = ("diffusion_models", "unet", "checkpoints", "text_encoders", "clip", "vae", "loras")
FOLDERS += ("latent_upscale_models", "upscale_models")
SETTINGS = ("extra_model_paths.yaml", "extra_models_config.yaml")
SEARCHED = (*FOLDERS, "model_patches")  # which holds parts of LTX-2.5
MARKS = (*{part.mark for part in PARTS.values() if part.mark}, TEXT_PROJECTION.encode())
GGUF_MARKS = (b"ltxv", b"gemma3", JOINT)
GEMMA_3_TOKEN = b"<start_of_image>"  # Gemma 2 and other models' tokenizers have no such token
START_BYTES, MAX_TOKENIZER_BYTES = 2**20, 2**27


def models_folder(folder: Path) -> Path | None:
    """The folder with ComfyUI's sub-folders: this one if it has two of them, or its `models`."""
    if _held(folder) > 1:
        return folder
    return folder / "models" if _held(folder / "models") else None


def tree_around(path: Path) -> Path | None:
    """The folder of models that a file or folder of ComfyUI is in."""
    path = Path(os.path.abspath(path))
    for parent in path.parents:
        if path.relative_to(parent).parts[0] in FOLDERS and _held(parent) > 1:
            return parent
    return None


def _held(folder: Path) -> int:
    """How many of ComfyUI's sub-folders it has; a part of a diffusers model is none of them."""
    found = [folder / name for name in FOLDERS]
    try:
        return sum(path.is_dir() and not (path / "config.json").exists() for path in found)
    except OSError:
        return 0


def entries(root: Path) -> Iterator[Path]:
    """Files and folders to look at: those of the root and, two levels deep, of its sub-folders."""
    yield from (path for path in inside(root) if path.is_file())
    seen = set()
    for folder in (*(root / name for name in SEARCHED), *extra_folders(root)):
        real = os.path.realpath(folder)
        if real in seen or not os.path.isdir(real):  # `unet` may be a link to `diffusion_models`
            continue
        seen.add(real)
        for path in inside(folder):
            yield path
            if path.is_dir() and not (path / "config.json").exists():
                yield from inside(path)


def extra_folders(root: Path) -> list[Path]:
    """The folders of models that ComfyUI's settings name besides its own. Raises InputError for
    settings that cannot be read."""
    import yaml

    found = []
    for file in (folder / name for folder in (root.parent, root) for name in SETTINGS):
        if not file.is_file():
            continue
        try:
            sections = yaml.safe_load(read_text(file)) or {}
            for section in sections.values():
                base = Path(os.path.expandvars(section.get("base_path") or "")).expanduser()
                base = file.parent / base
                for name in SEARCHED:
                    lines = str(section.get(name) or "").splitlines()
                    found += [base / line.strip() for line in lines if line.strip()]
        except (yaml.YAMLError, AttributeError, TypeError) as error:
            said = " ".join(str(error).split())[:120]
            raise InputError(f"{file}: no settings of ComfyUI ({said}); correct it") from None
    return found


def inside(folder: Path) -> list[Path]:
    """The entries of a folder, sorted; none if it cannot be read."""
    try:
        return visible(folder)
    except OSError:
        return []


def may_be_ltx(path: Path) -> bool:
    """Whether the header of a file has a word that a part of LTX-2 has. Nothing is parsed."""
    header = header_bytes(path)
    marks = GGUF_MARKS if header.startswith(GGUF) else MARKS
    return any(mark in header for mark in marks)


def header_bytes(path: Path) -> bytes:
    """The header of a safetensors file, the beginning of a GGUF file; nothing of any other."""
    if path.suffix not in WEIGHTS:
        return b""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return b""
        start = os.pread(file, 8, 0)
        if start.startswith(GGUF):
            return os.pread(file, START_BYTES, 0)
        size = int.from_bytes(start, "little")
        return os.pread(file, size, 8) if len(start) == 8 and size <= MAX_HEADER_BYTES else b""
    except OSError:
        return b""
    finally:
        os.close(file)


def is_gemma_tokenizer(path: Path) -> bool:
    """Whether a tokenizer.json is Gemma 3's, or a later one's, among those of other models."""
    try:
        small = path.is_file() and path.stat().st_size <= MAX_TOKENIZER_BYTES
        return small and GEMMA_3_TOKEN in path.read_bytes()
    except OSError:
        return False
