"""`ltx2rt probe`: run one network on given tensors."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ltx2rt.commands.options import model_options, run_flags, start_ranks
from ltx2rt.flags import add_flags, given_flags
from ltx2rt.instruments.probe import ProbeRequest, run
from ltx2rt.session.open import located
from ltx2rt.session.options import ModelOptions

EXAMPLE = """\
example:
  ltx2rt probe --model MODEL_DIR --component schedule --inputs in.safetensors \\
      --outputs out.safetensors
"""


def flags(to: Any) -> None:
    to.epilog = EXAMPLE
    run_flags(to)
    add_flags(to, ProbeRequest)


def asked(args: argparse.Namespace) -> tuple[ModelOptions, ProbeRequest]:
    """Raises InputError."""
    return model_options(args), ProbeRequest(**given_flags(args, ProbeRequest))


def files(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """The files that a run reads, and those that it writes."""
    options, request = asked(args)
    return options.files + request.files, [request.outputs] if request.outputs else []


def main(args: argparse.Namespace) -> int | None:
    options, request = asked(args)
    options = located(options)
    options.check()
    request.check()
    written = [request.outputs] if request.outputs else []
    if not request.lists and (status := start_ranks(args, options, written)) is not None:
        return status
    run(options, request)
