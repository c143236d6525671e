"""Trainers of either backend: an average of the parameters, batches of several sizes."""

from dataclasses import replace

import numpy as np
import pytest

from ltx2rt.backend import EMA, MOMENTS, get_backend
from tests.parity import ArraySource
from tests.placed_cases import TEXT
from tests.train_cases import OPTIMISER, WEIGHTS, parameters, placed, step

DECAY = 0.7
CLOSE = 1e-5  # float32: sums in another order


@pytest.mark.parametrize("kind", ["cuda", pytest.param("tpu", marks=pytest.mark.long)])
def test_batches_of_two_sizes_share_parameters_and_their_average(kind):
    backend, graph, half = get_backend(kind, "cpu", {}), placed("2.3", {}), {"text": TEXT // 2}
    other, (_, inputs) = placed("2.3", {}, **half), step("2.3", **half)
    weights = backend.load([graph], ArraySource(parameters("2.3")))
    optimiser = replace(OPTIMISER, ema=DECAY)
    made = backend.trainer(graph, weights, optimiser, "block", [other], deterministic=True)
    start = average = {n: x.copy() for n, x in made.state()["parameters"].items()}
    for feeds in (step("2.3")[1], inputs):
        made.accumulate(feeds, WEIGHTS)
        made.update(1e-2)
        now = made.state()
        average = {n: DECAY * x + (1 - DECAY) * now["parameters"][n] for n, x in average.items()}
    for name, x in average.items():
        np.testing.assert_allclose(now[EMA][name], x, rtol=CLOSE, atol=CLOSE)
    # alone, each size has the gradients that it has beside the other
    alone = backend.trainer(other, backend.load([other], ArraySource(parameters("2.3"))), optimiser)
    moments = {kind: {n: 0 * x for n, x in start.items()} for kind in MOMENTS}
    for trainer in (alone, made):
        trainer.restore({"parameters": start, EMA: start, **moments}, 0)
    for trainer in (alone, made):  # a state on a CPU may be the trainer's own memory
        trainer.accumulate(inputs, WEIGHTS)
        trainer.update(0.0)
    for name, x in alone.state()[MOMENTS[0]].items():
        beside, atol = made.state()[MOMENTS[0]][name], CLOSE * np.abs(x).max() + 1e-12
        np.testing.assert_allclose(beside, x, rtol=1e-4, atol=atol)
    with pytest.raises(ValueError, match="no graph of 2 has the sizes"):
        made.accumulate(inputs | {"video_context": inputs["video_context"][:, :1]}, WEIGHTS)
