"""A convolution and the zeros around its input."""

from __future__ import annotations

import numpy as np

from ltx2rt.fused.pattern import Found, Uses, node_of, pattern
from ltx2rt.graph.ir import Graph, Node, Spatial, Type
from ltx2rt.graph.network_ops import conv_flops
from ltx2rt.graph.ops import OPS, op


def _numpy_padded_conv(x, *weights, padding, stride, dilation):
    x = np.pad(x, ((0, 0), (0, 0), *((n, n) for n in padding)))
    return OPS["conv"].numpy(x, *weights, stride=stride, dilation=dilation)


@op(_numpy_padded_conv, flops=conv_flops)
def padded_conv(x: Type, *weights: Type, padding: Spatial, stride: Spatial, dilation: Spatial):
    """`conv` with `padding` zeros on either side of each spatial axis."""
    shape = (*x.shape[:2], *(size + 2 * n for size, n in zip(x.shape[2:], padding, strict=True)))
    wide = Type(x.axes, shape, x.dtype)
    result, args = OPS["conv"].rule(wide, *weights, stride=stride, dilation=dilation)
    return result, args | {"padding": padding}


@pattern
def _padded_conv(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """A convolution and the zeros around its input, equally wide on either side."""
    pad = uses.only(node.inputs[0], "pad") if node.op == "conv" else None
    if pad is None or pad.args["mode"] != "zeros":
        return None
    batch, channels, *spatial = pad.args["widths"]
    if any(batch + channels) or any(before != behind for before, behind in spatial):
        return None
    inputs, padding = (*pad.inputs, *node.inputs[1:]), tuple(before for before, _ in spatial)
    padded = node_of("padded_conv", inputs, node.outputs, padding=padding, **node.attrs)
    return [pad, node], [padded]
