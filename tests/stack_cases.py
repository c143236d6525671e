"""A stack of small blocks whose weights are encoded, and what runs it."""

from collections import Counter
from functools import cache

import numpy as np
import torch

from ltx2rt.graph import trace
from ltx2rt.graph.ir import Graph
from tests.parity import random_params

LAYERS = 5
MESH = {"tensor": 2}


@cache
def stack(layers: int = LAYERS, dtype: str = "float32") -> Graph:
    """Blocks with a linear of every kind that `place` splits, a gate, per-iteration data and
    per-iteration results."""

    def block(o, carry, invariant, data):
        h = o.rms_norm(carry["x"], "norm", over=("D",), eps=1e-6)
        wide = o.gelu(o.linear(h, "up", {"ff": 48}))
        inner = o.linear(h, "to_q", {"heads": 4, "head_dim": 8})
        inner = o.mul(inner, 2 * o.sigmoid(o.linear(h, "to_gate_logits", {"heads": 4})))
        y = o.linear(wide, "down", {"D": 32})
        y += o.linear(inner, "out", {"D": 32}, ("heads", "head_dim"))
        x = o.add(carry["x"], o.mul(y, data["gain"]))
        return {"x": x}, {"size": o.max(x, over=("D",))}

    def model(o):
        x, gain = o.input("x", B=2, tokens=3, D=32), o.input("gain", layers=layers)
        carry, outputs = o.repeat(block, layers, {"x": x}, data={"gain": gain}, prefix="blocks.*.")
        return {"y": o.linear(carry["x"], "proj_out", {"C": 16}), "size": outputs["size"]}

    return trace("stack", model, dtype)


@cache
def inputs() -> dict[str, np.ndarray]:
    x = np.random.default_rng(3).standard_normal((2, 3, 32), np.float32)
    return {"x": x, "gain": np.linspace(0.5, 1, LAYERS, dtype=np.float32)}


@cache
def params() -> dict[str, np.ndarray]:
    return random_params(stack())


def ops(graph: Graph) -> Counter:
    return Counter(node.op for node, times in graph.walk() for _ in range(times))


def blocks_graph() -> Graph:
    """Three linears under names of a transformer's blocks."""

    def model(o):
        def block(o, c, i, d):
            return {"x": o.linear(c["x"], "attn1.to_q", {"D": 32}, bias=False)}, {}

        prefix = "model.diffusion_model.transformer_blocks.*."
        return {"x": o.repeat(block, 3, {"x": o.input("x", B=2, D=32)}, prefix=prefix)[0]["x"]}

    return trace("blocks", model, "bfloat16")


def as_bytes(weight) -> np.ndarray:
    own = weight.view(torch.uint8).numpy() if isinstance(weight, torch.Tensor) else weight
    return np.asarray(own).view(np.uint8)
