"""Blocks whose samples or tokens go through in halves: the same values, every exchange in two, in
an order in which each travels under the other half, and where it must not be done."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from ltx2rt.graph.ir import Graph, Node, Value
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.passes.fuse import fuse
from ltx2rt.passes.interleave import SAMPLES, TOKENS, interleave
from ltx2rt.passes.rotate import rotate
from tests.placed_cases import STEPS, TWO_AXES, case

CLOSE = 2e-6  # float32: products of other shapes, by any BLAS
LEAST = 1100  # bytes: the exchanges of halves but those of norms and what is gathered


def exchanged(graph, axis=SAMPLES) -> Counter:
    """Bytes and number of what a block's collectives carry."""
    (repeat,) = graph.repeats
    found = Counter()
    for node in repeat.body.nodes:
        if node.op in COLLECTIVES and any(axis in v.type.axes for v in node.inputs):
            found["bytes"] += sum(v.type.nbytes for v in node.inputs)
            found["times"] += 1
    return found


def of_video(v: Value) -> bool:
    return {TOKENS, "D"} <= {*v.type.axes}


def behind(body: Graph, chosen: Callable[[Node], bool]) -> list[tuple[Node, set[Node]]]:
    """The chosen nodes, each with those that it must wait for."""
    before: dict[Value, set[Node]] = {}
    found = []
    for node in body.nodes:
        reached = set().union(*(before.get(v, ()) for v in node.inputs))
        if chosen(node):
            found.append((node, reached))
            reached = reached | {node}
        before |= dict.fromkeys(node.outputs, reached)
    return found


@pytest.mark.parametrize("profile,mesh", [
    ("hopper", {"tensor": 2}),
    ("trillium", {"tensor": 2, "sequence": 2}),
    ("trillium-2d", {"fsdp": 2, "tensor": 2}),
])  # fmt: skip
@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
def test_halves_have_the_same_values_and_exchange_as_much(generation, profile, mesh):
    """Two samples with positions, timesteps and masks of their own."""
    one = case(f"forward-{generation}")
    graph = one.placed(mesh, profile)
    halved = interleave(graph)
    assert halved.parameters() == graph.parameters() and halved.inputs.keys() == graph.inputs.keys()
    before, after = exchanged(graph), exchanged(halved)
    assert after["bytes"] == before["bytes"] and after["times"] == 2 * before["times"] > 0
    one.agrees(halved, CLOSE, graph)


@pytest.mark.parametrize(
    "profile,mesh,either",
    [("trillium", {"tensor": 2, "sequence": 2}, 3), ("trillium-2d", {"fsdp": 2, "tensor": 2}, 0)],
)
@pytest.mark.parametrize("name", ["forward-2.0", "forward-2.3"])
def test_tied_halves_take_turns_and_have_the_same_values(name, profile, mesh, either):
    """Whatever runs the nodes in another order, as far as they allow: each big exchange of a half
    leaves when the other half has computed up to its own, and is read after that. Weights are
    gathered when they may be.

    either: pairs of big exchanges that may still leave in either order, of those around an
    all_to_all, tied one way.
    """
    one = case(name)
    graph = one.placed(mesh, profile)
    plain, tied = interleave(graph), interleave(graph, tied=LEAST)
    assert exchanged(tied) == exchanged(plain)
    one.agrees(tied, CLOSE, graph)

    def independent(graph) -> int:
        """Pairs of big exchanges of halves that may leave in either order."""

        def big(node: Node) -> bool:
            values = (v.type for v in node.inputs if SAMPLES in v.type.axes)
            return node.op in COLLECTIVES and any(x.nbytes >= LEAST for x in values)

        found = behind(graph.repeats[0].body, big)
        return sum(a not in after for i, (a, _) in enumerate(found) for _, after in found[i + 1 :])

    assert independent(plain) >= 16 and independent(tied) == either
    params = {v for v in tied.repeats[0].body.params.values()}
    barriers = [node for node in tied.repeats[0].body.nodes if node.op == "barrier"]
    assert len(barriers) >= 8 and not any(v in params for node in barriers for v in node.inputs)


@pytest.mark.parametrize("least", [0, 30, 1345, 2304, 2305])
def test_halves_are_tied_whatever_is_big(least):
    one = case("forward-2.3")
    graph = one.placed({"tensor": 2, "sequence": 2}, "trillium")
    tied = interleave(graph, tied=least)
    assert any(node.op == "barrier" for node in tied.repeats[0].body.nodes) == (least <= 2304)
    one.agrees(tied, CLOSE, graph)


def test_neither_half_waits_for_the_other():
    (repeat,) = interleave(case("forward-2.3").on(2)).repeats
    carries = list(repeat.body.inputs.values())[: repeat.num_carries]
    half = {v: i % 2 for i, v in enumerate(carries)}
    for node in repeat.body.nodes:
        read = {half[v] for v in node.inputs if v in half}
        assert len(read) <= 1, node.op
        half |= dict.fromkeys(node.outputs, *read) if read else {}
    assert Counter(half.values())[0] == Counter(half.values())[1] > 100


@pytest.mark.parametrize("name,devices", [("forward-2.3", 1), ("guided-2.3", 2)])
def test_blocks_without_exchange_or_whose_nodes_pick_samples_stay(name, devices):
    """Alone there is no exchange; of a guided step the branches that are equal are computed once,
    and spread."""
    graph = case(name).on(devices)
    assert interleave(graph) is graph


@pytest.mark.parametrize(
    "mesh",
    [{"tensor": 2}, TWO_AXES],
    ids=str,
)
@pytest.mark.parametrize("name", STEPS)
def test_halves_of_the_tokens_have_the_same_values(name, mesh):
    """Images, prefixes, masks and STG; other devices' tokens stay whole."""
    one = case(name)
    graph = one.placed(mesh)
    halved = interleave(graph, TOKENS)
    assert halved.parameters() == graph.parameters() and halved.inputs.keys() == graph.inputs.keys()
    sums = [Counter(n.op for n in x.repeats[0].body.nodes) for x in (graph, halved)]
    assert sums[1]["all_reduce"] > sums[0]["all_reduce"]
    assert sums[1]["all_to_all"] == sums[0]["all_to_all"]
    for form in (halved, fuse(halved)):
        one.agrees(form, CLOSE, graph)


@pytest.mark.parametrize("name", ["forward-2.0", "guided-2.3", "masked-2.3"])
def test_tied_halves_of_the_tokens_take_turns_and_have_the_same_values(name):
    """In any legal order: from sum to sum of the video one half waits."""
    one = case(name)
    graph = one.placed({"tensor": 2, "sequence": 2}, "trillium")
    nodes = (node for repeat in graph.repeats for node in repeat.body.nodes)
    sums = (v for node in nodes if node.op == "all_reduce" for v in node.inputs)
    least = min(v.type.nbytes // 2 for v in sums if of_video(v))
    tied = interleave(graph, TOKENS, tied=least)
    one.agrees(tied, CLOSE, graph)
    summed = lambda node: node.op == "all_reduce" and any(map(of_video, node.inputs))  # noqa: E731
    for repeat in tied.repeats:
        sums = behind(repeat.body, summed)
        assert len(sums) == 8
        assert all(a in reached for (a, _), (_, reached) in pairwise(sums))
    assert interleave(tied, TOKENS) is tied


@pytest.mark.parametrize("generation", ["2.0", "2.3"])
def test_every_exchange_travels_under_a_product_of_the_other_half(generation):
    """In the order of the fused block and the next: its last is read first."""
    (repeat,) = fuse(interleave(rotate(case(f"guided-{generation}").on(2)), TOKENS)).repeats
    nodes = repeat.body.nodes
    products = [i for i, node in enumerate(nodes * 2) if node.op in ("linear", "linear_gelu")]
    entering = dict(zip(repeat.body.outputs.values(), repeat.body.inputs.values(), strict=False))
    found = []
    for i, node in enumerate(nodes):
        if node.op == "all_reduce" and any("D" in v.type.axes for v in node.inputs):
            brought = {*node.outputs, *(entering[v] for v in node.outputs if v in entering)}
            later = enumerate([*nodes[i + 1 :], *nodes], i + 1)
            read = next(j for j, reader in later if brought & set(reader.inputs))
            found.append(sum(i < j < read for j in products))
    assert len(found) == 8 and min(found) > 0, found


def test_tokens_stay_whole_where_halves_are_too_small_or_nothing_is_summed_or_weights_are_gathered():
    graph = case("guided-2.3").on(2)
    rows = 12 * graph.repeats[0].body.outputs["video"].type.size(SAMPLES)
    assert interleave(graph, TOKENS, rows // 2) is not graph
    assert interleave(graph, TOKENS, rows // 2 + 1) is graph
    alone = case("guided-2.3").on(1)
    assert interleave(alone, TOKENS) is alone
    one = case("guided-2.3")
    gathering = one.placed({"fsdp": 2, "tensor": 2})
    assert interleave(gathering, TOKENS) is gathering
