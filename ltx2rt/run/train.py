"""`ltx2rt.train`: the command `train run` in Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ltx2rt.backend import chosen_backend
from ltx2rt.flags import keywords
from ltx2rt.run.validation import with_validation
from ltx2rt.session.open import located, open_session
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.stopwatch import Progress
from ltx2rt.train.request import TrainRequest
from ltx2rt.train.run import start


def train(
    model: str | Path,
    *,
    data: Any,
    output: str | Path,
    backend: str = "auto",
    on_progress: Callable[[Progress], None] | None = None,
    **flags: Any,
) -> Path:
    """Train a LoRA and return its file, or go on with the run in `output`. data: a cache of `train
    prepare`, or several. flags: those of `train run`, dashes as underscores. on_progress(progress):
    after every step of the optimiser. Raises InputError."""
    chosen = chosen_backend() if backend == "auto" else backend
    named = {name: x for name, x in flags.items() if name in ModelOptions.__dataclass_fields__}
    rest = {name: x for name, x in flags.items() if name not in named}
    options = ModelOptions(**keywords({"model": model, "backend": chosen, **named}, ModelOptions))
    if options.num_gpus:
        options = replace(options, mesh={"data": options.num_gpus})
    options.check()
    request = TrainRequest(**keywords({"data": data, "output": output, **rest}, TrainRequest))
    made = with_validation(start(open_session(located(options, kind="dev")), request))
    began, first = time.monotonic(), -1
    of = made.request.steps or 1

    def report(row: dict[str, Any]) -> None:
        nonlocal first
        first = row["step"] if first < 0 else first
        step = row["step"] + 1
        left_s = (time.monotonic() - began) / (step - first) * (of - step)
        if on_progress:
            on_progress(Progress("train", step, of, step / of, left_s))

    return made.train(lambda text: None, report)
