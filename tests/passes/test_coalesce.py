"""Reductions that are ready together leave together; values, order of dependence and what is summed
stay the same."""

from collections import Counter
from itertools import chain

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ltx2rt.graph import Graph, trace
from ltx2rt.graph.interpret import interpret
from ltx2rt.graph.ir import Value
from ltx2rt.graph.verify import verify
from ltx2rt.passes.coalesce import coalesce
from tests.placed_cases import Case

WIDTH = 12  # 2 and 3 devices divide it
UNARY = ("tanh", "sigmoid", "silu")


def dag(choices: list[tuple[int, int, int]], devices: int, in_block: bool) -> Graph:
    """A graph of one node per choice (kind, operand, operand), each reading any earlier values."""

    def nodes(o, x):
        """Each device starts from another slice and ends by a sum, which device 0 sees."""
        local = o.shard(x, axis="D", mesh_axis="tensor", parts=devices)
        values = [local, o.cast(local, dtype="bfloat16")]
        for kind, i, j in choices:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind < 3:
                values.append(o.all_reduce(a, mesh_axis="tensor")[0])
            elif kind < 6:
                values.append(getattr(o, UNARY[kind - 3])(a))
            elif kind == 6:
                other = "bfloat16" if a.type.dtype == "float32" else "float32"
                values.append(o.cast(a, dtype=other))
            else:
                moved = o.affine(o.cast(b, dtype=a.type.dtype), scale=0.5, offset=0.1)
                values.append(o.add(a, moved))
        return [o.cast(v, dtype="float32") for v in values]

    def block(o, carry, invariant, data):
        total = o.stack(*nodes(o, carry["x"]), axis="values", dim=0)
        summed = o.all_reduce(total, mesh_axis="tensor")[0]
        return {"x": o.tanh(o.add(carry["x"], o.mean(summed, over=("values", "D"))))}, {}

    def model(o):
        x = o.input("x", tokens=2, D=WIDTH)
        if in_block:
            return {"y": o.repeat(block, 2, {"x": x})[0]["x"]}
        return {f"y{i}": v for i, v in enumerate(nodes(o, x))}

    graph = trace("dag", model, "float32")
    graph.mesh = {"tensor": devices}
    for repeat in graph.repeats:
        repeat.body.mesh = graph.mesh
    return graph


def reduces(graph: Graph) -> list[tuple[Value, ...]]:
    return [node.inputs for node, _ in graph.walk() if node.op == "all_reduce"]


def depth(graph: Graph) -> int:
    """The most all-reduces on a path through the graph, the fewest rounds of any order."""
    level: dict[Value, int] = {}
    for node in graph.nodes:
        before = max((level.get(v, 0) for v in node.inputs), default=0)
        level |= dict.fromkeys(node.outputs, before + (node.op == "all_reduce"))
    return max(level.values(), default=0)


CHOICES = st.lists(st.tuples(*(st.integers(0, n) for n in (8, 30, 30))), max_size=14)


@settings(max_examples=80, deadline=None)
@given(CHOICES, st.sampled_from((2, 3)), st.booleans())
def test_any_graph_keeps_its_values_with_no_more_communications(choices, devices, in_block):
    graph = dag(choices, devices, in_block)
    result = coalesce(graph)
    verify(result)
    Case.drawn(graph).agrees(result, 0)  # sums are the same sums
    before, after = reduces(graph), reduces(result)
    assert len(after) <= len(before)
    assert Counter(chain(*after)) == Counter(chain(*before))
    assert all(len({v.type.dtype for v in group}) == 1 for group in after)
    if not in_block:
        # rounds are as few as dependence allows, of two dtypes each
        assert len(after) <= 2 * depth(graph)


def test_independent_sums_leave_as_one_and_dependent_ones_in_turn():
    def model(o):
        x = o.shard(o.input("x", D=WIDTH), axis="D", mesh_axis="tensor", parts=2)
        a, b = (o.all_reduce(y, mesh_axis="tensor")[0] for y in (o.tanh(x), o.silu(x)))
        (c,) = o.all_reduce(o.mul(a, b), mesh_axis="tensor")
        return {"c": o.add(c, a)}

    graph = trace("net", model, "float32")
    graph.mesh = {"tensor": 2}
    assert [len(group) for group in reduces(coalesce(graph))] == [2, 1]


def test_dtypes_are_not_mixed():
    def model(o):
        x = o.input("x", D=WIDTH)
        y = o.cast(x, dtype="bfloat16")
        sums = (o.all_reduce(v, mesh_axis="tensor")[0] for v in (x, y))
        return dict(zip("ab", sums, strict=True))

    graph = trace("net", model, "float32")
    graph.mesh = {"tensor": 3}
    result = coalesce(graph)
    assert [len(group) for group in reduces(result)] == [1, 1]
    out = interpret(result, {}, {"x": np.ones(WIDTH)})
    assert out["b"].dtype == ml_dtypes.bfloat16 and np.all(out["b"] == 3)


def test_result_does_not_depend_on_a_second_pass():
    graph = dag([(0, 0, 0), (3, 2, 0), (1, 1, 0), (7, 3, 4), (0, 5, 0)], 2, False)
    once = coalesce(graph)
    assert [*map(len, reduces(coalesce(once)))] == [*map(len, reduces(once))]
