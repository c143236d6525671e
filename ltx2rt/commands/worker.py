"""`ltx2rt worker`: a replica for `ltx2rt serve`, which starts it; jobs come by stdin, events go to
stdout.

With a mesh of several processes they are ranks, and rank 0 is the one that is fed. Those of other
hosts are started there, by the variables of their launch; the server starts the first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ltx2rt.backend import keep_compiled
from ltx2rt.commands.generate import compiled_folder
from ltx2rt.commands.options import model_options, run_flags, start_ranks
from ltx2rt.flags import add_flags, flag_like, flags_of, given_flags
from ltx2rt.pipelines import make_request
from ltx2rt.pipelines.groups.text import Enhancing
from ltx2rt.ranks.environment import LAUNCHER, die_with_parent
from ltx2rt.run.files import Marks
from ltx2rt.run.plan import resolved_stages, usual_stages
from ltx2rt.serve.shapes import Shape, parse_shape
from ltx2rt.session.open import open_session, opened_checkpoint
from ltx2rt.session.options import ModelOptions
from ltx2rt.stages.stage import Stage
from ltx2rt.system import require_posix
from ltx2rt.weights.checkpoint import Checkpoint

flag = flags_of("jobs")


@dataclass(frozen=True)
class Warm(Marks):
    """Preparation of a worker before its first job."""

    warm: tuple[Shape, ...] = flag(
        (),
        "sizes to build and load for before the first job",
        parse_shape,
        metavar="WIDTHxHEIGHTxFRAMES[:PIPELINE]",
        repeat=True,
        common="jobs",
    )
    prompt_enhancer: Path | None = flag_like(
        Enhancing, "prompt_enhancer", help="folder of a Gemma for requests with `enhance_prompt`"
    )
    previews: bool = flag(True, "show no previews of videos in progress", name="--no-previews")


def flags(to: argparse.ArgumentParser) -> None:
    run_flags(to)
    add_flags(to, Warm)


def files(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    return model_options(args).files, []


def main(args: argparse.Namespace) -> int:
    require_posix("worker")
    options, ready = model_options(args), Warm(**given_flags(args, Warm))
    options.check()
    ready.check_marks()
    first = args.crew is None or args.crew.rank == 0
    launched = os.environ.get(LAUNCHER) == str(os.getppid())
    if args.own_process and (first or launched):  # what a shell has started may outlive it
        die_with_parent()
    checkpoint = opened_checkpoint(options)
    if (status := start_ranks(args, options, [], fed=True)) is not None:
        return status
    from ltx2rt.serve.worker import Pipe, work

    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    if args.own_process:
        os.dup2(2, 1)  # what libraries print must not get among the events
        sys.stdout = sys.stderr
        keep_compiled(options.backend, compiled_folder(os.environ))
    pipe = Pipe(inbox if first else None, outbox)
    session = open_session(
        options, checkpoint=checkpoint, stages=partial(stages_of, options=options, warm=ready.warm)
    )
    return work(session, ready.warm, pipe, args.crew, ready.previews, ready.prompt_enhancer, ready)


def stages_of(
    checkpoint: Checkpoint, options: ModelOptions, warm: Sequence[Shape]
) -> Sequence[Stage]:
    """The stages of the first size to be ready for, or the usual ones."""
    if not warm:
        return usual_stages(checkpoint, options)
    return resolved_stages(
        checkpoint, options, make_request(warm[0].pipeline, prompt="a clip", seed=0, **warm[0].clip)
    )
