"""One way to run a graph anywhere, and the distance every parity statement uses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from ltx2rt.backend import get_backend
from ltx2rt.graph.interpret import interpret
from ltx2rt.graph.ir import Cut, Graph
from ltx2rt.weights.files import cut


class ArraySource:
    """A tensor source over arrays in memory."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self.arrays = arrays

    def names(self):
        return self.arrays.keys()

    def info(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def read(self, name: str, *cuts: Cut) -> np.ndarray:
        return cut(self.arrays[name], *cuts)


@cache
def _backend(name: str, mesh: tuple[tuple[str, int], ...] = ()):
    return get_backend(name, "cpu", dict(mesh))


def run_graph(
    kind: str,
    graph: Graph,
    params: Mapping[str, np.ndarray],
    inputs: Mapping[str, Any],
    layers: str = "scan",
) -> dict[str, np.ndarray]:
    """Outputs of `graph` in float32 numpy. kind: "numpy" (the interpreter), "cuda" or "tpu" (the
    backend, on CPU)."""
    if kind == "numpy":
        return {k: np.asarray(v, np.float32) for k, v in interpret(graph, params, inputs).items()}
    backend = _backend(kind, tuple(graph.mesh.items()))
    weights = backend.load([graph], ArraySource(params))
    outputs = backend.lower(graph, layers=layers)(weights, inputs)
    return {k: backend.to_host(v) for k, v in outputs.items()}


def relative_l2(a: Any, b: Any) -> float:
    """||a - b|| / ||b||, in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, f"shapes differ: {a.shape} and {b.shape}"
    return float(np.linalg.norm((a - b).ravel()) / np.linalg.norm(b.ravel()))


def random_params(graph: Graph, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 parameters: matrices N(0, 1/fan_in), vectors near 1 ("norm") or N(0, 0.1^2)."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, spec in sorted(graph.parameters().items()):
        r = rng.standard_normal(spec.shape, dtype=np.float32)
        if len(spec.shape) == 1:
            params[name] = 1 + 0.1 * r if "norm" in name and name.endswith("weight") else 0.1 * r
        elif "table" in name or "registers" in name:
            params[name] = 0.3 * r
        else:
            params[name] = r / np.sqrt(np.prod(spec.shape[1:])).astype(np.float32)
    return params
