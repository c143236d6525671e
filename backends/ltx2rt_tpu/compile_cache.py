"""Compiled programs on disk, so that a later process starts without compiling.

The files are JAX's persistent compilation cache, under keys of HLO, compiler options, devices and
compiler build. This module chooses the folder, one for each set of versions; unusable entries are
noted and replaced.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import jax

from ltx2rt.notes import note
from ltx2rt.ranks import facts
from ltx2rt_tpu.factory import FACTORY

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
UNREADABLE = re.compile(
    r"Error reading persistent compilation cache entry for '(?P<module>.+?)': (?P<why>.*)",
    re.DOTALL,
)


def keep_compiled(root: Path) -> None:
    """Cache this process's compiled programs under `root`. It sets JAX's configuration and where
    warnings go, so call it only in a process that ltx2rt owns."""
    folder = root / versions()
    others = sorted(path.name for path in root.glob("ltx2rt-*") if path != folder)
    if others and not folder.exists():
        found = ", ".join(others)
        note(f"{root} has executables of {found}, which {folder.name} cannot use: compiling")
    try:
        for path in (root, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        why_not = next(filter(None, map(_open_to_others, (root, folder))), None)
    except OSError as error:
        why_not = error.strerror
    if why_not:
        note(
            f"cannot keep executables in {folder} ({why_not}), every run will compile; see "
            f"{VARIABLE}"
        )
        jax.config.update("jax_compilation_cache_dir", None)  # which JAX has from the same variable
        return
    if not os.access(folder, os.W_OK):
        note(f"{folder} is not writable: what is compiled now is not kept")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # only for GPUs; it puts the folder into every key
    jax.config.update("jax_persistent_cache_enable_xla_caches", "")
    show = warnings.showwarning

    def mending(message, category, filename, lineno, file=None, line=None):
        if found := UNREADABLE.match(str(message)):
            note(
                f"an executable of {found['module']} in {folder} is damaged ({found['why']}): "
                "compiling it anew"
            )
            remove_damaged(folder, found["module"])
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = mending
    warnings.filterwarnings("always", message="Error reading persistent compilation cache entry")


def versions() -> str:
    """Names the packages that compile, such as ltx2rt-0.1.0_jax-0.10.2_jaxlib-0.10.2."""
    return "_".join(
        f"{name}-{version}" for name, version in facts.versions(FACTORY.packages).items()
    )


def _open_to_others(path: Path) -> str | None:
    """Why another user could put an executable there, which would run; None if not."""
    if not hasattr(os, "getuid"):  # Windows keeps a user's folders from others
        return None
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user"
    if found.st_mode & 0o022:
        return f"others may write to {path}; chmod go-w"
    return None


def remove_damaged(folder: Path, module: str) -> None:
    """Remove the module's files that do not decompress, or all: JAX never overwrites a file."""
    # The installed packages decide which of two formats it is.
    from jax._src.compilation_cache import decompress_executable

    files, damaged = list(folder.glob(f"{module}-*")), []
    for path in files:
        try:
            decompress_executable(path.read_bytes())
        except Exception:  # whatever the format raises: an unreadable program is compiled again
            damaged.append(path)
    for path in damaged or files:
        path.unlink(missing_ok=True)
