"""Training steps that tests share: a tiny transformer with adapters beside every linear of its
blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from ltx2rt.backend import AdamW, Backend, Trainer
from ltx2rt.graph import Graph
from ltx2rt.models import train_step, transformer
from ltx2rt.passes.adapters import Adapters, modules
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from tests.parity import ArraySource, random_params
from tests.placed_cases import AUDIO_TOKENS, TEXT, TOKENS, positions, transformer_config

Arrays, Mesh = dict[str, np.ndarray], dict[str, int]
BATCH, RANK, SCALE = 2, 3, 0.5
WEIGHTS = {"video_loss": 1.0, "audio_loss": 0.7}
OPTIMISER = AdamW(max_norm=0.5)


@cache
def step(
    generation: str, batch: int = BATCH, blocks: int = 2, text: int = TEXT
) -> tuple[Graph, Arrays]:
    """The graph without adapters, and inputs whose first frame and first sounds are given."""
    config, rng = transformer_config(generation), np.random.default_rng(5)
    config = replace(config, num_layers=blocks)
    feeds = transformer.position_feeds(config, *positions())
    shape = transformer.ForwardShape(
        batch, TOKENS, AUDIO_TOKENS, text, transformer.coordinate_counts(feeds)
    )
    graph = train_step.trace(config, shape, "float32")
    for name, v in graph.inputs.items():
        if name in feeds:
            continue
        sizes = (BATCH, *v.type.shape[1:])
        if name.endswith("noised"):
            feeds[name] = np.ones(sizes, np.int32)
            feeds[name][0, :3] = 0
        elif name.endswith("sigma"):
            feeds[name] = np.array([0.3, 0.8], np.float32)
        elif name.endswith("keyframes_mask"):
            feeds[name] = np.zeros(sizes, np.float32)
        else:
            feeds[name] = rng.standard_normal(sizes, np.float32)
    return graph, feeds


def placed(
    generation: str,
    mesh: Mesh,
    weights_dtype: str | None = None,
    blocks: int = 2,
    dropout: bool = False,
    text: int = TEXT,
) -> Graph:
    graph, _ = step(generation, BATCH // mesh.get("data", 1), blocks, text)
    adapters = Adapters(frozenset(modules(graph)), RANK, SCALE, dropout=dropout)
    profile = PROFILES["trillium-2d" if "fsdp" in mesh else "hopper"]
    return Placement(profile, mesh, weights_dtype, adapters).local(graph, "transformer")


@cache
def parameters(generation: str) -> Arrays:
    """Of the network and of its adapters, neither half of them zero."""
    return random_params(placed(generation, {}))


def trainer(backend: Backend, generation: str, mesh: Mesh, remat: str = "block") -> Trainer:
    graph = placed(generation, mesh)
    weights = backend.load([graph], ArraySource(parameters(generation)))
    return backend.trainer(graph, weights, OPTIMISER, remat)


def trained(made: Trainer, inputs: Arrays, steps: int = 1) -> Arrays:
    """Losses of the first step, squared norms of its gradients, and everything after the last.

    Those of one step are the losses that are measured without a gradient, too."""
    found: Arrays = {}
    measured = made.losses(inputs) if steps == 1 else {}
    for i in range(steps):
        losses, norms = made.accumulate(inputs, WEIGHTS), made.update(1e-2)
        if not i:
            for name, x in measured.items():  # float32, another order of summation
                np.testing.assert_allclose(x, losses[name], rtol=1e-5)
            found = {**losses, "norms": np.array([norms[name] for name in sorted(norms)])}
    for kind, arrays in made.state().items():
        found |= {f"{kind} {name}": x for name, x in arrays.items()}
    return found
