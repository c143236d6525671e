"""Attention between exchanges in groups of heads: the same values, as many bytes exchanged, and
where it must not be done."""

from collections import Counter

import pytest

from ltx2rt.passes.heads import group_heads, is_grouped
from ltx2rt.passes.interleave import TOKENS, interleave
from tests.placed_cases import case

CLOSE = 2e-6  # float32: products of arrays that lie otherwise, by any BLAS


def local(one, **mesh):
    return one.placed(mesh, "trillium")


def exchanged(graph) -> Counter:
    """Numbers of attentions and exchanges in a block, and what the latter carry."""
    (repeat,) = graph.repeats
    found = Counter(node.op for node in repeat.body.nodes)
    sent = (node for node in repeat.body.nodes if node.op == "all_to_all")
    found["bytes"] = sum(v.type.nbytes for node in sent for v in node.inputs)
    return found


@pytest.mark.parametrize(
    "mesh",
    [{"sequence": 2}, pytest.param({"tensor": 2, "sequence": 2}, marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.parametrize("name", ["forward-2.0", "forward-2.3", "masked-2.3", "guided-2.5"])
def test_groups_have_the_same_values_and_exchange_as_much(name, mesh):
    """Masks, which all heads share, among them; halves of the tokens behind it."""
    one = case(name)
    graph = local(one, **mesh)
    grouped = group_heads(graph, 3)
    assert is_grouped(grouped) and not is_grouped(graph)
    assert grouped.parameters() == graph.parameters()
    before, after = exchanged(graph), exchanged(grouped)
    assert after["attention"] == before["attention"] + 2
    assert (after["all_to_all"], after["bytes"]) == (3 * before["all_to_all"], before["bytes"])
    one.agrees(grouped, CLOSE, graph)
    halves = interleave(graph, TOKENS)
    one.agrees(interleave(grouped, TOKENS), CLOSE, halves)


def test_heads_stay_together_where_they_do_not_divide_or_travel_or_halves_take_turns():
    one = case("forward-2.3")
    graph = local(one, sequence=2)
    assert group_heads(graph, 5) is graph
    alone = local(one)
    assert group_heads(alone, 2) is alone
    tied = interleave(local(one, tensor=2, sequence=2), tied=0)
    assert group_heads(tied, 2) is tied
