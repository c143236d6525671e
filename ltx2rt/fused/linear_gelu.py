"""A linear layer and the GELU behind it, or in front of one of quantised rows."""

from __future__ import annotations

from ltx2rt.fused.pattern import Found, Uses, node_of, pattern
from ltx2rt.graph.ir import Axes, Graph, Node, Sizes, Type
from ltx2rt.graph.network_ops import linear_flops
from ltx2rt.graph.ops import OPS, op


def _numpy_linear_gelu(*operands, **args):
    return OPS["gelu"].numpy(OPS["linear"].numpy(*operands, **args))


@op(_numpy_linear_gelu, flops=linear_flops, linear="plain")
def linear_gelu(x: Type, weight: Type, bias: Type, *, contract: Axes, out: Sizes):
    """A linear layer with bias, then GELU."""
    return OPS["linear"].rule(x, weight, bias, contract=contract, out=out)


def _numpy_gelu_quantised_linear(x, *others, **args):
    return OPS["quantised_linear"].numpy(OPS["gelu"].numpy(x), *others, **args)


@op(_numpy_gelu_quantised_linear, flops=linear_flops, linear="quantised")
def gelu_quantised_linear(x: Type, *others: Type, contract: Axes, out: Sizes):
    """GELU, then a linear layer of quantised weights."""
    return OPS["quantised_linear"].rule(x, *others, contract=contract, out=out)


@pattern
def _linear_gelu(graph: Graph, uses: Uses, node: Node) -> Found | None:
    linear = uses.only(node.inputs[0], "linear") if node.op == "gelu" else None
    if linear is None or len(linear.inputs) < 3:
        return None
    return [linear, node], [node_of("linear_gelu", linear.inputs, node.outputs, **linear.attrs)]


@pattern
def _gelu_quantised(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """The GELU in front of a quantised linear, which reads its operand row by row anyway."""
    gelu = uses.only(node.inputs[0], "gelu") if node.op == "quantised_linear" else None
    if gelu is None:
        return None
    inputs = (*gelu.inputs, *node.inputs[1:])
    return [gelu, node], [node_of("gelu_quantised_linear", inputs, node.outputs, **node.attrs)]
