"""The report of a run, and the settings in its clip's metadata."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.backend import Backend
from ltx2rt.pipelines.request import Request
from ltx2rt.run.plan import Plan
from ltx2rt.session.options import plain
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.version import VERSION
from ltx2rt.weights.files import digest


def report_of(
    session: Session, plan: Plan, watch: Stopwatch, programs_built: int, loaded_bytes: int
) -> dict[str, Any]:
    """The dict of `--report`, once the frames are taken."""
    return watch.report(
        seed=plan.request.seed,
        settings=plan.request.settings() | {"options": plain(session.asked)},
        programs_built=programs_built,
        loaded_bytes=loaded_bytes,
        peak_bytes=session.backend.peak_bytes(),
        versions=versions(session.backend),
        device=session.backend.device().name,
        mesh=dict(session.backend.mesh),
        lora=[{"file": m.file, "matched": m.matched, "total": m.total} for m in plan.all_merges],
    )


def versions(backend: Backend) -> dict[str, str]:
    return {
        "ltx2rt": VERSION,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        **backend.versions,
    }


def named(path: Path) -> dict[str, str]:
    """A file by name and digest, without the folders of this machine; of what is no file (any more)
    the name."""
    return {"name": path.name, "digest": digest(path)} if path.exists() else {"name": path.name}


def comment(session: Session, request: Request, video: int) -> dict[str, Any]:
    """The clip's metadata: prompt, seed, model, versions and every setting; files by name alone."""
    checkpoint = session.checkpoint
    model = {
        **named(checkpoint.path),
        "layout": checkpoint.layout,
        "generation": checkpoint.config.release.name,
    }
    options = plain(session.asked, named)
    return {
        "prompt": request.prompt,
        "seed": request.seeds[video],
        "model": model,
        "versions": versions(session.backend),
        "settings": request.settings(named) | {"options": options},
    }
