"""The model graph: typed SSA over named axes, traced from plain functions, interpreted by numpy."""

from ltx2rt.graph import network_ops, placement_ops  # noqa: F401
from ltx2rt.graph.ir import Graph, Node, ParamSpec, Type, Value
from ltx2rt.graph.trace import Ops, Term, trace, traced

__all__ = ["Graph", "Node", "Ops", "ParamSpec", "Term", "Type", "Value", "trace", "traced"]
