"""`ltx2rt worker`: a replica for `ltx2rt serve`, which starts it; jobs come by stdin, events go to stdout."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ltx2rt.backend import get_factory, keep_compiled
from ltx2rt.commands.generate import compiled_folder
from ltx2rt.commands.options import model_options
from ltx2rt.errors import InputError
from ltx2rt.flags import add_flags, flag, given_flags
from ltx2rt.serve.shapes import Shape, parse_shape
from ltx2rt.session.open import open_session, opened_checkpoint
from ltx2rt.session.options import ModelOptions

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Warm:
    warm: tuple[Shape, ...] = flag(
        (),
        "sizes to be ready for before the first job",
        parse_shape,
        metavar="WIDTHxHEIGHTxFRAMES[:PIPELINE]",
        repeat=True,
    )


def flags(to: argparse.ArgumentParser) -> None:
    add_flags(to, ModelOptions, Warm)


def files(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    return model_options(args).files, []


def main(args: argparse.Namespace) -> int:
    options, warm = model_options(args), Warm(**given_flags(args, Warm)).warm
    options.check()
    require_one_process(options)
    checkpoint = opened_checkpoint(options)
    from ltx2rt.serve.worker import Pipe, work

    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    if args.own_process:
        os.dup2(2, 1)  # what libraries print must not get among the events
        sys.stdout = sys.stderr
        die_with_parent()
        keep_compiled(options.backend, compiled_folder(os.environ))
    pipe = Pipe(inbox, outbox)
    return work(open_session(options, checkpoint=checkpoint), warm, pipe)


def require_one_process(options: ModelOptions) -> None:
    """Raises InputError."""
    if get_factory(options.backend).process_per_device and (size := prod(options.mesh.values())) > 1:
        raise InputError(
            f"mesh: {dict(options.mesh)} takes {size} processes, a replica is one; leave --mesh, --num-gpus and "
            "--tp-size out, and use --replicas for several GPUs"
        )


def die_with_parent() -> None:
    """Let the kernel end this process when the one that started it ends, however that happens."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
