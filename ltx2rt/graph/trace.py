"""Graphs from model text: calling `o.<op>` records a typed node.

Model text is plain functions with `o` as their first argument. Every op of the table is a method of
it; operands are positional, attributes are keywords. `o.under("attn1")` is the same namespace with
a longer parameter prefix. The result is a `Term`: `+ - * /` with another term records `add`, `sub`,
`mul`, `div`, with a number `affine`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ltx2rt.errors import GraphError
from ltx2rt.graph.ir import Axes, Graph, Node, Repeat, Sizes, Type, Value
from ltx2rt.graph.ops import OPS
from ltx2rt.graph.verify import verify


def emit(graph: Graph, op: str, *inputs: Value, **attrs: Any) -> Any:
    """Append a node typed by the op table; returns its result, or a tuple. Raises GraphError."""
    return _record(graph, op, inputs, attrs, Value)


def _record(
    graph: Graph,
    op: str,
    inputs: tuple[Value, ...],
    attrs: dict[str, Any],
    value: Callable[[str, Type], Value],
) -> Any:
    types, args = OPS[op].rule(*(v.type for v in inputs), **attrs)
    many = isinstance(types, tuple)
    results = tuple(value(f"%{next(graph.serial)}", t) for t in (types if many else (types,)))
    graph.nodes.append(Node(op, inputs, results, attrs, args).mark_typed())
    return results if many else results[0]


@dataclass(frozen=True, eq=False)
class Term(Value):
    """A value of model text, with arithmetic that is recorded; passes have plain values and write
    ops. A number is one `affine`: `x * 2` its scale, `x + 1` its offset."""

    o: Ops = field(repr=False)

    def __add__(self, y: Value | float) -> Term:
        return self.o.add(self, y) if isinstance(y, Value) else self.o.affine(self, offset=float(y))

    def __sub__(self, y: Value | float) -> Term:
        return self.o.sub(self, y) if isinstance(y, Value) else self + -float(y)

    def __mul__(self, y: Value | float) -> Term:
        return self.o.mul(self, y) if isinstance(y, Value) else self.o.affine(self, scale=float(y))

    def __truediv__(self, y: Value | float) -> Term:
        return self.o.div(self, y) if isinstance(y, Value) else self * (1 / y)

    def __rsub__(self, number: float) -> Term:
        return self.o.affine(self, scale=-1.0, offset=float(number))

    __radd__, __rmul__ = __add__, __mul__


class Ops:
    """The namespace `o`: records into a graph; declares parameters under `prefix` in `dtype`."""

    def __init__(self, graph: Graph, dtype: str, prefix: str = ""):
        self.graph, self.dtype, self.prefix = graph, dtype, prefix

    def under(self, prefix: str) -> Ops:
        return Ops(self.graph, self.dtype, f"{self.prefix}{prefix}.")

    def term(self, name: str, type: Type) -> Term:
        return Term(name, type, self)

    def input(self, name: str, dtype: str | None = None, **sizes: int) -> Term:
        """Declare an input; keyword order is axis order."""
        if name in self.graph.inputs:
            raise GraphError(f"{self.graph.name}: input {name} is declared twice")
        term = self.term(name, Type(tuple(sizes), tuple(sizes.values()), dtype or self.dtype))
        self.graph.inputs[name] = term
        return term

    def each(self, x: Term, axis: str) -> list[Term]:
        """All positions of an axis, which is dropped."""
        return [
            self._emit("at", (x,), {"axis": axis, "index": i}) for i in range(x.type.size(axis))
        ]

    def full(self, value: float, dtype: str | None = None, **sizes: int) -> Term:
        """A number everywhere; keyword order is axis order."""
        return self._emit("full", (), {"value": value, "dtype": dtype or self.dtype, **sizes})

    def param(self, name: str, *, dtype: Any = None, **sizes: int) -> Term:
        """Declare a parameter in the checkpoint's shape; keyword order is axis order."""
        return self._param(name, tuple(sizes), tuple(sizes.values()), dtype)

    def _param(
        self, name: str, axes: Axes, shape: tuple[int, ...], dtype: str | None = None
    ) -> Term:
        full, type = self.prefix + name, Type(axes, shape, dtype or self.dtype)
        known = self.graph.params.setdefault(full, self.term(full, type))
        assert isinstance(known, Term), f"{full} was declared by a pass"
        if known.type != type:
            raise GraphError(f"{full}: declared as {known.type} and as {type}")
        return known

    def output(self, name: str, value: Term) -> None:
        self.graph.outputs[name] = value

    def __getattr__(self, name: str) -> Callable[..., Term]:
        if name not in OPS:
            raise AttributeError(f"o.{name}: no such op; the table has {', '.join(sorted(OPS))}")
        return lambda *operands, **attrs: self._emit(name, operands, attrs)

    def _emit(self, name: str, operands: tuple[Value | None, ...], attrs: dict[str, Any]) -> Any:
        """Record a node; returns its result, or a tuple for an op with several."""
        inputs = tuple(v for v in operands if v is not None)
        try:
            return _record(self.graph, name, inputs, attrs, self.term)
        except GraphError as error:
            where, names = self.prefix or self.graph.name, ", ".join(v.name for v in inputs)
            raise GraphError(f"{where}: {error} (operands: {names})") from None

    def linear(
        self,
        x: Term,
        name: str,
        out: Sizes,
        contract: Axes | None = None,
        bias: bool = True,
    ) -> Term:
        """Linear layer (name.weight, name.bias) over x's last axis, or axes `contract`."""
        contract = contract or x.type.axes[-1:]
        out_axis, in_axis = "*".join(out), "*".join(contract)
        rows, columns = math.prod(out.values()), math.prod(x.type.shape[-len(contract) :])
        weight = self._param(f"{name}.weight", (out_axis, in_axis), (rows, columns))
        b = self._param(f"{name}.bias", (out_axis,), (rows,)) if bias else None
        return self._emit("linear", (x, weight, b), {"contract": contract, "out": out})

    def rms_norm(self, x: Term, name: str | None = None, *, over: Axes, eps: float) -> Term:
        """RMSNorm over the named axes; with the weight `name`.weight if a name is given."""
        weight = None
        if name is not None:
            size = math.prod(map(x.type.size, over))
            weight = self._param(f"{name}.weight", ("*".join(over),), (size,))
        return self._emit("rms_norm", (x, weight), {"over": over, "eps": eps})

    def conv(
        self,
        x: Term,
        name: str,
        out_channels: int,
        kernel: tuple[int, ...],
        stride: tuple[int, ...] | None = None,
        dilation: tuple[int, ...] | None = None,
        bias: bool = True,
    ) -> Term:
        """Unpadded convolution layer of x (B, channels, *spatial), weight (out, in, *kernel)."""
        ones = (1,) * len(kernel)
        axes = ("out", "in", *(f"k{i}" for i in range(len(kernel))))
        weight = self._param(f"{name}.weight", axes, (out_channels, x.type.shape[1], *kernel))
        b = self._param(f"{name}.bias", ("out",), (out_channels,)) if bias else None
        plan = {"stride": stride or ones, "dilation": dilation or ones}
        return self._emit("conv", (x, weight, b), plan)

    def conv_transpose(
        self, x: Term, name: str, out_channels: int, kernel: int, stride: int, bias: bool = True
    ) -> Term:
        """Uncropped 1-D transposed convolution layer `name` of x (B, channels, time)."""
        shape = (x.type.shape[1], out_channels, kernel)
        weight = self._param(f"{name}.weight", ("in", "out", "k0"), shape)
        b = self._param(f"{name}.bias", ("out",), (out_channels,)) if bias else None
        return self._emit("conv_transpose", (x, weight, b), {"stride": stride})

    def group_norm(self, x: Term, name: str, groups: int, eps: float) -> Term:
        weight = self._param(f"{name}.weight", ("channels",), (x.type.shape[1],))
        bias = self._param(f"{name}.bias", ("channels",), (x.type.shape[1],))
        return self._emit("group_norm", (x, weight, bias), {"groups": groups, "eps": eps})

    def emit(self, name: str, *operands: Term | None, **attrs: Any) -> Any:
        """An op of the table by name, given parameters as values (shared, or not `.weight`)."""
        return self._emit(name, operands, attrs)

    def repeat(
        self,
        body: Callable[[Ops, dict[str, Term], dict[str, Term], dict[str, Term]], tuple[dict, dict]],
        count: int,
        carry: dict[str, Term],
        invariant: dict[str, Term] | None = None,
        data: dict[str, Term] | None = None,
        prefix: str = "",
        first: int = 0,
    ) -> tuple[dict[str, Term], dict[str, Term]]:
        """Run `body` count times.

        body(o, carry, invariant, data) -> (carry, outputs). data has the leading axis "layers" of
        size count here and lacks it inside; outputs gain it. Parameters of the body are declared
        under `prefix`, in which `*` is the iteration (see `numbered`), from `first` on. Returns the
        final carry and the stacked outputs.
        """
        inner = Graph(f"{self.graph.name}.{prefix.rstrip('.') or 'body'}")
        o, groups = Ops(inner, self.dtype, self.prefix + prefix), []
        for values in (carry, invariant or {}, data or {}):
            if twice := inner.inputs.keys() & values.keys():
                raise GraphError(f"repeat: {', '.join(twice)} is given twice")
            stacked = values is data
            types = {n: v.type.unstacked() if stacked else v.type for n, v in values.items()}
            groups.append({name: o.term(name, type) for name, type in types.items()})
            inner.inputs |= groups[-1]
        new_carry, outputs = body(o, *groups)
        inner.outputs = {name: new_carry[name] for name in carry} | outputs
        types = {name: value.type for name, value in carry.items()}
        types |= {name: value.type.stacked("layers", count) for name, value in outputs.items()}
        results = {name: self.term(f"%{next(self.graph.serial)}", t) for name, t in types.items()}
        repeat = Repeat(inner, count, len(carry), len(invariant or {}), first=first)
        operands = (*carry.values(), *(invariant or {}).values(), *(data or {}).values())
        made = tuple(results.values())
        self.graph.nodes.append(
            Node("repeat", operands, made, {"count": count}, {"repeat": repeat})
        )
        return {n: results[n] for n in carry}, {n: results[n] for n in outputs}


def trace(name: str, model: Callable[..., Mapping[str, Value]], dtype: str, *args: Any) -> Graph:
    """The verified graph of `model(o, *args)`, which returns its outputs by name."""
    graph = Graph(name)
    graph.outputs = dict(model(Ops(graph, dtype), *args))
    return verify(graph)


def traced(name: str) -> Callable[[Callable[..., Mapping[str, Value]]], Callable[..., Graph]]:
    """Make of model text `model(o, *args)` a function of (*args, dtype) that returns its graph."""

    def decorate(model: Callable[..., Mapping[str, Value]]) -> Callable[..., Graph]:
        return functools.wraps(model)(lambda *args: trace(name, model, args[-1], *args[:-1]))

    return decorate
