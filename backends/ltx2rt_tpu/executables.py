"""Compiled programs on disk, so that a later process starts without compiling.

The files are JAX's persistent compilation cache: every program of a process, under a key of its HLO (sources, shapes,
mesh, layouts), compiler options and flags, device topology and compiler build; nothing else is ever used. What is
decided here is the folder, one for each set of versions, and that whatever cannot be used is said and replaced.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
PACKAGES = ("ltx2rt", "jax", "jaxlib", "libtpu")
UNREADABLE = re.compile(
    r"Error reading persistent compilation cache entry for '(?P<module>.+?)': (?P<why>.*)", re.DOTALL
)


def keep_executables(root: Path) -> None:
    """Keep what this process compiles under `root`, and start from what lies there. For a process of its own: it sets
    JAX's configuration and where warnings go."""
    folder = root / versions()
    others = sorted(path.name for path in root.glob("ltx2rt-*") if path != folder)
    if others and not folder.exists():
        _say(f"{root} has executables of {', '.join(others)}, which {folder.name} cannot use: compiling")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _say(f"cannot keep executables in {folder} ({error.strerror}), every run will compile; see {VARIABLE}")
        jax.config.update("jax_compilation_cache_dir", None)  # which JAX has from the same variable
        return
    if not os.access(folder, os.W_OK):
        _say(f"{folder} is not writable: what is compiled now is not kept")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    show = warnings.showwarning

    def mending(message, category, filename, lineno, file=None, line=None):
        if found := UNREADABLE.match(str(message)):
            _say(f"an executable of {found['module']} in {folder} is damaged ({found['why']}): compiling it anew")
            remove_damaged(folder, found["module"])
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = mending
    warnings.filterwarnings("always", message="Error reading persistent compilation cache entry")


def versions() -> str:
    """Names the packages that compile, such as ltx2rt-0.1.0_jax-0.10.2_jaxlib-0.10.2."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name}-{version(name)}")
        except PackageNotFoundError:
            continue
    return "_".join(found)


def remove_damaged(folder: Path, module: str) -> None:
    """Remove the module's files that do not decompress, if all do then all: JAX writes none whose name is taken."""
    from jax._src.compilation_cache import (
        decompress_executable,
    )  # which of two formats it is depends on what is installed

    files, damaged = list(folder.glob(f"{module}-*")), []
    for path in files:
        try:
            decompress_executable(path.read_bytes())
        except Exception:  # whatever the format raises: what cannot be read here is compiled anew
            damaged.append(path)
    for path in damaged or files:
        path.unlink(missing_ok=True)


def _say(text: str) -> None:
    print(f"ltx2rt: {text}", file=sys.stderr, flush=True)
