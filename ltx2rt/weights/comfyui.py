"""ComfyUI's folders of models: which folder is one, and the files and folders in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ltx2rt.errors import InputError
from ltx2rt.text_files import read_text
from ltx2rt.weights.parts import inside

# Source of the names: its folder_paths.py.
FOLDERS = ("diffusion_models", "unet", "checkpoints", "text_encoders", "clip", "vae", "loras")
FOLDERS += ("latent_upscale_models", "upscale_models")
SETTINGS = ("extra_model_paths.yaml", "extra_models_config.yaml")
SEARCHED = (*FOLDERS, "model_patches")  # which holds parts of LTX-2.5


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
    """Number of ComfyUI's sub-folders in it, not counting parts of a diffusers model."""
    found = [folder / name for name in FOLDERS]
    try:
        return sum(path.is_dir() and not (path / "config.json").exists() for path in found)
    except OSError:
        return 0


def entries(root: Path) -> Iterator[Path]:
    """Files and folders to look at, in the root and, two levels deep, in its sub-folders."""
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
    """Further model folders that ComfyUI's settings name. Raises InputError."""
    import yaml

    found = []
    for file in (folder / name for folder in (root.parent, root) for name in SETTINGS):
        if not file.is_file():
            continue
        try:
            sections = yaml.safe_load(read_text(file)) or {}
            for section in filter(None, sections.values()):  # all of its lines may be comments
                base = Path(os.path.expandvars(section.get("base_path") or "")).expanduser()
                base = file.parent / base
                for name in SEARCHED:
                    lines = str(section.get(name) or "").splitlines()
                    found += [base / line.strip() for line in lines if line.strip()]
        except (yaml.YAMLError, AttributeError, TypeError) as error:
            said = " ".join(str(error).split())[:120]
            raise InputError(f"{file}: no settings of ComfyUI ({said}); correct it") from None
    return found
