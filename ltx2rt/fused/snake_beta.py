"""The vocoder's SnakeBeta, between the filters to twice the rate and back."""

from __future__ import annotations

from functools import cache

import numpy as np

from ltx2rt.errors import GraphError
from ltx2rt.fused.pattern import Found, Uses, node_of, pattern
from ltx2rt.graph.ir import Graph, Node, Type, Value
from ltx2rt.graph.ops import OPS, _same_dtype, op
from ltx2rt.graph.trace import trace
from ltx2rt.models import vocoder


def snake_windows(taps: int) -> tuple[int, int, tuple[int, int]]:
    """Padding and cropping of a signal around two filters of `taps` (even), one to twice its rate
    and one back.

    Returns the edge samples added on either side before going up, the position at which the kept
    part then starts, and the edge samples added (before, after) before going down.
    """
    pad = -(-(taps // 2) // 2)
    return pad, 2 * pad + (taps - 1) // 2, (taps // 2 - 1, taps // 2)


def _numpy_snake_beta(x, up, down, alpha, beta, *, eps):
    b, c, t = x.shape
    pad, start, edges = snake_windows(up.shape[-1])
    y = np.pad(x.reshape(b * c, 1, t), ((0, 0), (0, 0), (pad, pad)), mode="edge")
    y = 2 * OPS["conv_transpose"].numpy(y, up, stride=2)[..., start : start + 2 * t]
    y = y.reshape(b, c, 2 * t)
    share = np.exp(beta)[:, None] + np.float32(eps)
    y = y + np.square(np.sin(y * np.exp(alpha)[:, None])) / share
    y = np.pad(y.reshape(b * c, 1, 2 * t), ((0, 0), (0, 0), edges), mode="edge")
    return OPS["conv"].numpy(y, down, stride=(2,), dilation=(1,)).reshape(b, c, t)


@op(_numpy_snake_beta)
def snake_beta(x: Type, up: Type, down: Type, alpha: Type, beta: Type, *, eps: float):
    """x + sin(e^alpha x)^2 / (e^beta + eps) per channel at twice the rate, between the filters `up`
    and `down` (1, 1, taps): x (B, channels, time), edges repeated."""
    _same_dtype(x, up, down, alpha, beta)
    if not (len(x.axes) == 3 and up.shape == down.shape and up.shape[-1] % 2 == 0):
        raise GraphError(f"snake_beta: {x}, filters {up}, {down}")
    if not (alpha.shape == beta.shape == x.shape[1:2]):
        raise GraphError(f"snake_beta: {x} does not fit {alpha}, {beta}")
    return x, {"eps": eps}


@cache
def _snake_pattern(x: Type) -> Graph:
    return trace("snake", lambda o: {"y": vocoder.snake_beta(o, o.input("x", **x.sizes))}, x.dtype)


@pattern
def snakes(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """The SnakeBeta that the model text itself writes for a value of this type."""
    result = node.outputs[0]
    if node.op != "merge" or result.type.axes != ("B", "channels", "time"):
        return None
    pattern = _snake_pattern(result.type)
    found = _unified(uses, pattern, result)
    if found is None:
        return None
    gone, bound = found
    names = ("upsample.filter", "downsample.lowpass.filter", "act.alpha", "act.beta")
    operands = [bound[v] for v in (pattern.inputs["x"], *(pattern.params[name] for name in names))]
    return gone, [node_of("snake_beta", operands, node.outputs, eps=vocoder.SNAKE_EPS)]


def _unified(
    uses: Uses, pattern: Graph, result: Value
) -> tuple[list[Node], dict[Value, Value]] | None:
    """The nodes that make `result` as `pattern` makes its one output, and the value that each of
    its values is here.

    None if they do not, or if something else reads a value in between.
    """
    makers = pattern.makers()
    (output,) = pattern.outputs.values()
    bound: dict[Value, Value] = {}
    nodes: list[Node] = []
    waiting = [(output, result)]
    while waiting:
        wanted, value = waiting.pop()
        if bound.setdefault(wanted, value) is not value or wanted.type != value.type:
            return None
        maker, node = makers.get(wanted), uses.makers.get(value)
        if maker is None or any(node is n for n in nodes):
            continue
        if node is None or (node.op, node.attrs) != (maker.op, maker.attrs):
            return None
        if len(node.inputs) != len(maker.inputs):
            return None
        nodes.append(node)
        waiting += zip(maker.inputs, node.inputs, strict=True)
    inside = set(nodes)
    between = [v for node in nodes for v in node.outputs if v is not result]
    for v in between:
        if v in uses.kept or not inside.issuperset(uses.readers[v]):
            return None
    return nodes, bound
