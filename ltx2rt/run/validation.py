"""Clips that a training run makes of prompts while it goes on, with the LoRA of that step: merged
into weights of a separate session, as `generate --lora` does, which are freed after each time. The
trained model stays on the device meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ltx2rt.errors import InputError
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.request import Request
from ltx2rt.run import run as runs
from ltx2rt.run.plan import make_plan
from ltx2rt.session.options import NO_LORA, LoraSpec, existing_file
from ltx2rt.session.session import Session
from ltx2rt.stages.stage import FRAMES
from ltx2rt.text_files import flag_lines, parse
from ltx2rt.train.data import parse_bucket
from ltx2rt.train.run import TrainingRun

FLAG = "--validation"


@dataclass(frozen=True)
class Validation:
    """The requests, and the folder that has one for each step."""

    session: Session
    requests: list[Request]
    folder: Path

    def __call__(self, lora: Path, step: int) -> list[Path]:
        """Write FOLDER/STEP/NN.mp4, or .wav of sound without a picture. Raises InputError if memory
        is short while the trained model stays on the device."""
        session, target = self.session, self.folder / f"{step:06d}"
        target.mkdir(parents=True, exist_ok=True)
        session.use_loras((LoraSpec(lora),))
        made = []
        try:
            for number, request in enumerate(self.requests):
                run = runs.Run(session, request)
                run.make()
                suffix = "mp4" if run.plan.makes(FRAMES) else "wav"
                made.append(target / f"{number:02d}.{suffix}")
                run.save(0, made[-1:])
        finally:
            session.weights.close()
        return made


def with_validation(run: TrainingRun) -> TrainingRun:
    """The run, which then makes the clips of its request's `validation`. Raises InputError for a
    line that cannot be one, before anything is trained."""
    r, session = run.request, run.session
    if r.validation is None:
        return run
    existing_file(FLAG, r.validation)
    if session.backend.num_processes > 1 or session.backend.mesh.get("data", 1) > 1:
        count = prod(session.backend.mesh.values())
        raise InputError(
            f"{FLAG}: clips are made by one process without the mesh axis data, this run has "
            f"{count} devices; leave it out, and use `ltx2rt generate --lora` on the files that "
            "it writes"
        )
    options = replace(session.options, distilled_lora=NO_LORA)  # none where the LoRA is trained
    own = Session(session.checkpoint, session.backend, options, session.dtype)
    requests = list(_requests(run, r.validation))
    for request in requests:
        if request.name != "ic-lora":  # which has no plan without a LoRA
            make_plan(own, request)
    if not r.dry_run:
        run.validate = Validation(own, requests, r.output / "validation")
    return run


def _requests(run: TrainingRun, path: Path) -> Iterator[Request]:
    for number, line in enumerate(flag_lines(FLAG, path), 1):
        if not line.strip():
            continue
        try:
            request = _request(run, parse(line, {"prompt": str}), number)
            request.check_files()
        except ValueError as error:
            raise InputError(f"{FLAG}: {path}, line {number}: {error}") from None
        yield request


def _request(run: TrainingRun, line: Mapping[str, Any], number: int) -> Request:
    """Keys: prompt; image (FILE[:FRAME[:STRENGTH]], or a list); reference (a file, for an IC-LoRA);
    size (WxHxF, default: as trained); seed; pipeline; and the clip flags of that."""
    r, g, rest = run.request, run.step.geometry, dict(line)
    name = rest.pop("pipeline", "one-stage" if "video" in run.samples.streams else "t2a")
    given: dict[str, Any] = {"num_frames": (g.frames - 1) * g.time_factor + 1, "fps": g.fps}
    height, width = g.size_px
    if "size" in rest:
        bucket = parse_bucket(str(rest.pop("size")), "size")
        width, height, given["num_frames"] = bucket.width, bucket.height, bucket.frames
    if "reference" in rest:  # its first stage, which makes half of the size, is all that is made
        name, width, height = "ic-lora", 2 * width, 2 * height
        given |= {"skip_stage_2": True, "video_conditioning": [str(rest.pop("reference"))]}
    if name != "t2a":
        given |= {"width": width, "height": height}
    return make_request(name, **{"seed": r.validation_seed + number - 1, **given, **rest})
