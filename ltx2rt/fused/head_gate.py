"""The gate of each head and its operands, with the quantised linear behind it or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ltx2rt.errors import GraphError
from ltx2rt.fused.pattern import Found, Uses, node_of, pattern
from ltx2rt.graph.ir import Axes, Graph, Node, Sizes, Type
from ltx2rt.graph.network_ops import linear_flops
from ltx2rt.graph.ops import OPS, _same_dtype, op


def _numpy_head_gate(y, logits, *choice):
    if choice:
        keep, v = choice
        y = np.where(keep.reshape(-1, *[1] * (y.ndim - 1)) != 0, y, v)
    return y * (2 * OPS["sigmoid"].numpy(logits))[..., None]


@op(_numpy_head_gate)
def head_gate(y: Type, logits: Type, *choice: Type):
    """y * 2 sigmoid(logits), one logit per head: y (B, ..., heads, head_dim), logits (B, ...,
    heads).

    choice: keep (B) and v like y: samples with keep 0 are v's instead of y's.
    """
    _same_dtype(y, logits, *choice[1:])
    if choice:
        keep, v = choice
        if not (keep.axes == y.axes[:1] and keep.shape == y.shape[:1] and v == y):
            raise GraphError(f"head_gate: {keep} or {v} of {y}")
    if not (logits.axes == y.axes[:-1] and logits.shape == y.shape[:-1]):
        raise GraphError(f"head_gate: {logits} does not fit {y}")
    return y, {}


def divided(operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Operands of head_gate_quantised_linear: the gate's, and weight, scale and bias, if there is
    one."""
    at = 4 if len(operands) > 5 else 2
    return operands[:at], operands[at:]


def _numpy_head_gate_quantised_linear(*operands, **args):
    gate, others = divided(operands)
    return OPS["quantised_linear"].numpy(_numpy_head_gate(*gate), *others, **args)


@op(_numpy_head_gate_quantised_linear, flops=linear_flops, linear="quantised")
def head_gate_quantised_linear(*operands: Type, contract: Axes, out: Sizes):
    """The per-head gate, then a linear layer of quantised weights over all heads of a token."""
    gate, others = divided(operands)
    y = gate[0]
    OPS["head_gate"].rule(*gate)
    if tuple(contract) != y.axes[-2:]:
        raise GraphError(
            f"head_gate_quantised_linear: {contract} of {y} are not the heads of a token"
        )
    return OPS["quantised_linear"].rule(y, *others, contract=contract, out=out)


@pattern
def _head_gate(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """y * 2 sigmoid(logits), y of some samples chosen from other values or not."""
    if node.op != "mul":
        return None
    y, gate = node.inputs
    doubled = uses.only(gate, "affine")
    if doubled is None or doubled.args != {"scale": 2.0, "offset": 0.0}:
        return None
    sigmoid = uses.only(doubled.inputs[0], "sigmoid")
    if sigmoid is None or gate.type != y.type.replaced(len(y.type.axes) - 1, len(y.type.axes), {}):
        return None
    gone, inputs = [sigmoid, doubled, node], [y, *sigmoid.inputs]
    if (chosen := uses.only(y, "select")) is not None:
        keep, kept, other = chosen.inputs
        if keep.type.axes == y.type.axes[:1] and kept.type == other.type == y.type:
            gone, inputs = [chosen, *gone], [kept, *sigmoid.inputs, keep, other]
    return gone, [node_of("head_gate", inputs, node.outputs)]


@pattern
def _head_gate_quantised(graph: Graph, uses: Uses, node: Node) -> Found | None:
    """The gate in front of a quantised linear that reads all heads of a token."""
    gate = uses.only(node.inputs[0], "head_gate") if node.op == "quantised_linear" else None
    if gate is None or tuple(node.attrs["contract"]) != gate.outputs[0].type.axes[-2:]:
        return None
    inputs = (*gate.inputs, *node.inputs[1:])
    return [gate, node], [node_of("head_gate_quantised_linear", inputs, node.outputs, **node.attrs)]
