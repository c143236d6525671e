"""The video VAE's norm and the SiLU behind it."""

from __future__ import annotations

from ltx2rt.errors import GraphError
from ltx2rt.fused.pattern import Found, Uses, node_of, pattern
from ltx2rt.graph.ir import Graph, Node, Type
from ltx2rt.graph.ops import OPS, op


def _numpy_pixel_norm_silu(x, *, dim, eps):
    return OPS["silu"].numpy(OPS["rms_norm"].numpy(x, dims=(dim,), weight_view=None, eps=eps))


@op(_numpy_pixel_norm_silu)
def pixel_norm_silu(x: Type, *, over: str, eps: float):
    """RMSNorm without weight over one axis, then SiLU."""
    if over not in x.axes:
        raise GraphError(f"pixel_norm_silu over {over}: {x} lacks it")
    return x, {"dim": x.axes.index(over), "eps": eps}


@pattern
def _pixel_norm_silu(graph: Graph, uses: Uses, node: Node) -> Found | None:
    norm = uses.only(node.inputs[0], "rms_norm") if node.op == "silu" else None
    if norm is None or len(norm.inputs) > 1 or len(norm.attrs["over"]) > 1:
        return None
    attrs = {"over": norm.attrs["over"][0], "eps": norm.attrs["eps"]}
    return [norm, node], [node_of("pixel_norm_silu", norm.inputs, node.outputs, **attrs)]
