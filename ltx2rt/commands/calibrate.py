"""`ltx2rt calibrate`: a file of step plans for a model, with what each costs in picture and
sound."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ltx2rt.atomic_file import check_outputs, replacing
from ltx2rt.commands.options import model_options, pipeline_flags, read_prompts, run_flags
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, check_bounds, flag, given_flags
from ltx2rt.notes import note
from ltx2rt.pipelines import pipeline
from ltx2rt.pipelines.groups.images import Hdr
from ltx2rt.pipelines.groups.seeds import NoiseFile, Videos
from ltx2rt.pipelines.groups.segments import Segments
from ltx2rt.pipelines.groups.steps import MAX_STEPS, AllSkips, Interval, Skips
from ltx2rt.pipelines.groups.text import Enhancing, Prompt
from ltx2rt.run.plan import prepared, resolved_stages
from ltx2rt.session.open import located, open_session
from ltx2rt.weights.part_table import wanted_by

EXAMPLE = """\
example:
  ltx2rt calibrate --model MODEL_DIR --pipeline two-stage --output plans.json
  ltx2rt generate --model MODEL_DIR --step-plan plans.json:15 --prompt "a red fox" --output fox.mp4
"""
# have no meaning here
OF_ONE_CLIP = (Prompt, Enhancing, NoiseFile, Videos, Segments, Hdr, Interval)
SEED = 0  # seed of the first prompt
MAX_PROMPTS = 1000
PROMPTS = (  # speech, music, impacts, moving cameras, faces, still scenes: in both halves
    "A woman looks into the camera and says: good evening, and welcome to the show.",
    "A drummer plays a fast solo on a small stage under red light.",
    "A glass falls from a table and breaks on a stone floor, in slow motion.",
    "The camera flies over a snowy mountain ridge at sunrise while wind howls.",
    "Close-up of an old man's face as he begins to laugh quietly.",
    "A still lake at dawn with mist, no wind, birds far away.",
    "A red fox runs through deep snow toward the camera, its steps crunching.",
    "A train passes a level crossing at night with a loud horn.",
    "Two children talk to each other on a swing in a park.",
    "A pianist's hands play a slow melody, seen from above.",
    "Hammer blows on an anvil in a dark forge, sparks at every blow.",
    "A drone circles a lighthouse on a cliff in heavy surf.",
    "Portrait of a girl who turns her head and smiles, soft window light.",
    "A candle burns on a wooden table in an empty room.",
    "Waves roll onto a beach at sunset, seagulls cry.",
    "A busy market street in the rain, umbrellas, voices and dripping water.",
)


@dataclass(frozen=True)
class CalibrateOptions:
    """The flags of `calibrate` itself."""

    output: Path = flag(MISSING, "JSON file for the plans", group="output")
    prompts: Path | None = flag(
        None, "text file of prompts, half of them held out (default: our own)", group="clip"
    )
    evaluations: tuple[int, ...] = flag(
        (),
        "numbers of evaluations to find plans for (default: a half and a third of the steps)",
        int,
        group="sampling",
        repeat=True,
        least=2,
        most=MAX_STEPS,
    )


def flags(to: Any) -> None:
    run_flags(to)
    add_flags(to, CalibrateOptions)
    pipeline_flags(to, *OF_ONE_CLIP, AllSkips)
    to.epilog = EXAMPLE


def different_prompts(path: Path | None) -> tuple[str, ...]:
    """Raises InputError unless the file has two prompts or more."""
    if path is None:
        return PROMPTS
    found = tuple(dict.fromkeys(read_prompts(path)))
    if not 2 <= (count := len(found)) <= MAX_PROMPTS:
        expected = f"expected 2 to {MAX_PROMPTS}"
        raise InputError(f"--prompts: {path} has {count} different prompts, {expected}")
    return found


def main(args: argparse.Namespace) -> None:
    options, own = model_options(args), CalibrateOptions(**given_flags(args, CalibrateOptions))
    check_bounds(own)
    type_ = pipeline(args.pipeline)
    if not type_.has(Skips):
        raise InputError(f"--pipeline: {type_.name} has no guided stage to leave steps out of")
    prompts = different_prompts(own.prompts)
    request = type_(**({"seed": SEED} | given_flags(args, type_)), prompt=prompts[0])
    options = located(options, wanted_by(type_))
    checkpoint, request = prepared(options, request)
    check_outputs([("--output", own.output)], [*options.files, *checkpoint.files, *request.files])
    counts = own.evaluations or tuple(round(request.steps / part) for part in (2, 3))
    for count in counts:
        if not 2 <= count < request.steps:
            expected = f"expected 2 or more and below --steps, which are {request.steps}"
            raise InputError(f"--evaluations: {count}, {expected}")
    stages = partial(resolved_stages, options=options, request=request)
    session = open_session(options, checkpoint=checkpoint, stages=stages)
    if session.backend.num_processes > 1:
        raise InputError("--mesh: calibrate runs in one process; pass a mesh of one device")
    from ltx2rt.instruments import calibrate

    folder = own.output.with_name(f"{own.output.name}.runs")
    say = partial(note, prefix="")
    with closing(calibrate.CalibrationRuns(session, request, prompts, folder, say)) as runs:
        document = calibrate.calibrate(runs, sorted(set(counts), reverse=True))
        with replacing(own.output) as partial_file:
            partial_file.write_text(json.dumps(document, sort_keys=True) + "\n")
        runs.remove()
    print(calibrate.table(document))
    print(own.output)
