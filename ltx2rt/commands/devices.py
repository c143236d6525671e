"""`ltx2rt devices`: what each backend finds here."""

from __future__ import annotations

import argparse
from typing import Any

from ltx2rt.backend import backend_names, get_backend, get_factory
from ltx2rt.errors import InputError
from ltx2rt.placement.profiles import resolve
from ltx2rt.scheduling import VARIABLE, left_out


def flags(to: Any) -> None:
    """None."""


def main(args: argparse.Namespace) -> None:
    if names := left_out():
        print(f"scheduling that is left out by {VARIABLE}: {', '.join(sorted(names))}")
    for name in backend_names():
        try:
            backend = get_backend(name)
        except InputError as error:
            print(f"{name}: not available ({error})")
            continue
        found = backend.device()
        versions = ", ".join(f"{k} {v}" for k, v in backend.versions.items())
        free, total = found.free_bytes / 2**30, found.total_bytes / 2**30
        each = " on each" if found.count > 1 and found.kind != "cpu" else ""
        memory = f"{free:.1f} of {total:.1f} GiB free{each}"
        split = profile_for(get_factory(name).profile_key(found), found.count)
        devices = f"{found.count} x {found.name} ({found.kind})"
        if backend.is_main:
            print(f"{name}: {devices}, {memory}, {split}, {versions}")


def profile_for(kind: str, count: int) -> str:
    """Default split of networks over so many devices. kind: as `resolve` has it."""
    try:
        profile, mesh = resolve(None, kind, {}, count)
    except InputError as error:
        return str(error)
    split = ",".join(f"{a}={n}" for a, n in mesh.items())
    return f"profile {profile.name}{f' with --mesh {split}' if mesh else ''}"
