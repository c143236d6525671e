"""The report of a run, and the settings in its clip's metadata."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import numpy as np

from ltx2rt.backend import Backend
from ltx2rt.flags import named_files
from ltx2rt.media.provenance import Origin, now
from ltx2rt.pipelines.clip import Clip
from ltx2rt.run.files import Marks
from ltx2rt.run.plan import Plan
from ltx2rt.session.options import plain
from ltx2rt.session.session import Session
from ltx2rt.session.stopwatch import Stopwatch
from ltx2rt.version import VERSION
from ltx2rt.weights.digests import digest, files_of


def report_of(
    session: Session, plan: Plan, watch: Stopwatch, programs_built: int, loaded_bytes: int
) -> dict[str, Any]:
    """The dict of `--report`, once the frames are taken."""
    return watch.report(
        seed=plan.clip.seeds[0],
        settings=plan.clip.request.settings() | {"options": plain(session.asked)},
        programs_built=programs_built,
        loaded_bytes=loaded_bytes,
        peak_bytes=session.backend.peak_bytes(),
        versions=versions(session.backend),
        device=session.backend.device().name,
        mesh=dict(session.backend.mesh),
        lora=[{"file": m.file, "matched": m.matched, "total": m.total} for m in plan.all_merges],
    )


def versions(backend: Backend) -> dict[str, str]:
    ours = {"ltx2rt": VERSION, "python": sys.version.split()[0], "numpy": np.__version__}
    return ours | backend.versions


def named(path: Path) -> dict[str, str]:
    """A file by name and digest, without folders; without a digest if it is not there."""
    return {"name": path.name, "digest": digest(path)} if path.exists() else {"name": path.name}


def model_of(session: Session) -> dict[str, str]:
    """The model by name and by the digest of all its files."""
    checkpoint = session.checkpoint
    return {"name": checkpoint.path.name, "digest": checkpoint.digest()}


def options_of(session: Session) -> dict[str, Any]:
    """The options; files by name and digest."""
    model = session.asked.model
    return plain(session.asked, lambda path: model_of(session) if path == model else named(path))


def written(session: Session, plan: Plan) -> dict[str, str]:
    """Size and time of every file of the plan, by name: digests skip some bytes."""
    places = {source.where for source in session.checkpoint.sources.values()}
    loras = (*plan.loras.user, plan.loras.distilled)
    places |= {*plan.clip.request.files, *(lora.path for lora in loras if lora)}
    found = {}
    for file in sorted(file for place in places for file in files_of(place)):
        status = file.stat()
        when = datetime.fromtimestamp(status.st_mtime, UTC).isoformat()
        found[f"{file.parent.name}/{file.name}"] = f"{status.st_size} bytes of {when}"
    return found


SHOWN = ("image", "video", "sound")  # kinds of files that a manifest lists


def labels(session: Session, clip: Clip, video: int, marks: Marks) -> dict[str, Any]:
    """The keywords `comment`, `pixel_aspect`, `colours` and `origin` of `write_clip`."""
    about = comment(session, clip, video)
    label: dict[str, Any] = {"comment": about if marks.metadata else None}
    if clip.source:
        info = clip.source.info
        label |= {"pixel_aspect": info.pixel_aspect, "colours": info.colours}
    if not marks.provenance:
        return label
    files: dict[bool, list[Path]] = {False: [], True: []}
    for f, path in named_files(clip.request):
        if f.metadata["flag"].file in SHOWN and path.is_file():
            files[f.metadata["flag"].kept].append(path)
    time, model = now(), about["model"]
    label["origin"] = Origin(
        model=f"LTX-{model['generation']}",
        model_version=f"{model['name']} {model.get('digest', '')}".strip(),
        identity=str(uuid5(NAMESPACE_URL, json.dumps([time, about]))),
        time=time,
        kept=tuple(files[True]),
        shown=tuple(files[False]),
        signature=marks.signature,
    )
    return label


def comment(session: Session, clip: Clip, video: int) -> dict[str, Any]:
    """The clip's metadata: prompt, seed, model, versions and every setting; files by name alone."""
    checkpoint = session.checkpoint
    about = {"layout": checkpoint.layout, "generation": checkpoint.config.release.name}
    return {
        "prompt": clip.request.prompt,
        "seed": clip.seeds[video],
        "model": model_of(session) | about,
        "versions": versions(session.backend),
        "settings": clip.request.settings(named) | {"options": options_of(session)},
    }
