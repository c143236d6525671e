"""`ltx2rt compile`: the programs of a run, compiled for devices that need not be here."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from ltx2rt.commands.options import json_flag, planned_flags, planned_options
from ltx2rt.flags import add_flags, given_flags
from ltx2rt.instruments.ahead import (
    Compilation,
    Target,
    compile_job,
    header,
    plan_job,
    plan_training,
    row,
    to_json,
)
from ltx2rt.instruments.make import standing_for
from ltx2rt.pipelines import pipeline
from ltx2rt.run.training_estimate import training_flags, training_step

EPILOG = """\
examples:
  ltx2rt compile --preset ltx-2.3 --device-kind v6e:2x4 --component denoise-step --stage 1
  ltx2rt compile --preset ltx-2.3 --device-kind v6e:2x4 --train 768x512x49 --mesh data=4,tensor=2

Figures are of the compiled programs, per device and call; nothing runs and no weight is read.
Needs libtpu, best in a virtual environment of its own. XLA_FLAGS are honoured, dumps included.
"""


def flags(to: Any) -> None:
    to.epilog = EPILOG
    add_flags(to, Target)
    planned_flags(to, "compile")
    training_flags(to)
    json_flag(to)


def job_of(args: argparse.Namespace) -> Compilation:
    """Raises InputError."""
    type_, options = pipeline(args.pipeline), replace(planned_options(args), dtype="bfloat16")
    target, step = Target(**given_flags(args, Target)), training_step(args)
    with standing_for(args.preset, options) as options:
        if step:
            return plan_training(options, *step, target)
        prompt = "" if hasattr(args, "context") else "compiled"
        request = type_(prompt=prompt, seed=0, **given_flags(args, type_))
        return plan_job(options, request, target)


def main(args: argparse.Namespace) -> None:
    job = job_of(args)
    found, results = [], compile_job(job)
    if not args.json:
        print(header(job), flush=True)
    try:
        for cell, compiled in results:
            found.append(to_json(job, cell, compiled))
            if not args.json:
                print(row(job, cell, compiled), flush=True)
    finally:  # an interrupt loses nothing that is compiled
        if args.json:
            print(json.dumps(found, indent=1))
