"""Sparse self-attention: its order and table, its op on every backend, and its placement."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ltx2rt.errors import GraphError
from ltx2rt.graph.interpret import interpret
from ltx2rt.graph.trace import trace
from ltx2rt.models.token_blocks import Density, block_plan
from ltx2rt.passes.place import place
from ltx2rt.placement.cost import flops
from ltx2rt.testing import relative_l2, run_graph

RNG = np.random.default_rng(5)
KINDS = ("numpy", "cuda", "tpu")


def table(rows: int, ends: int, kept: int) -> np.ndarray:
    """Rows that see the first blocks, themselves and others."""
    found = []
    for row in range(ends, ends + rows):
        others = [b for b in range(ends, ends + rows) if b != row]
        drawn = RNG.choice(others, kept - ends - 1, replace=False)
        found.append(sorted([*range(ends), row, *drawn.tolist()]))
    return np.array(found, np.int32)


def graph(tokens: int, rows: int, kept: int, ends: int, size: int = 8, heads: int = 4):
    def model(o):
        shape = {"B": 2, "tokens": tokens, "heads": heads, "head_dim": 8}
        q, k, v = (o.input(n, "float32", **shape) for n in "qkv")
        blocks = o.input("table", "int32", blocks=rows, seen=kept)
        how = {"scale": 0.4, "size": size, "ends": ends}
        return {
            "y": o.block_attention(q, k, v, blocks, **how),
            "recall": o.block_recall(q, k, blocks, **how),
            "dense": o.attention(q, k, v, scale=0.4),
        }

    return trace("sparse", model, "float32")


def feeds(tokens: int, rows: int, kept: int, ends: int, heads: int = 4) -> dict[str, np.ndarray]:
    drawn = {n: RNG.standard_normal((2, tokens, heads, 8), np.float32) for n in "qkv"}
    return drawn | {"table": table(rows, ends, kept)}


def masked(x: dict[str, np.ndarray], size: int, ends: int) -> tuple[np.ndarray, np.ndarray]:
    """The definition in float64 by a mask over all keys: result and recall."""
    q, k, v = (x[n].astype(np.float64) for n in "qkv")
    blocks = np.arange(q.shape[1]) // size
    rows = [np.isin(blocks, x["table"][b - ends]) if b >= ends else blocks >= 0 for b in blocks]
    seen = np.array(rows)
    scores = np.einsum("btnd,bsnd->bnts", q, k) * 0.4
    weights = np.exp(scores)
    whole = (weights * seen).sum(-1) / weights.sum(-1)
    weights = weights * seen
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnd->btnd", weights, v), whole[..., blocks >= ends].mean(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "ends"), [(64, 0), (61, 0), (64, 2), (59, 1)])
def test_op_sees_the_blocks_of_its_row(kind, tokens, ends):
    sizes = (tokens, 8 - ends, 4, ends)
    x = feeds(*sizes)
    found = run_graph(kind, graph(*sizes), {}, x)
    expected, recall = masked(x, 8, ends)
    assert relative_l2(found["y"], expected) <= 1e-6
    assert relative_l2(found["recall"], recall) <= 1e-6
    assert 0.2 < recall.mean() < 0.9  # neither all nor nothing


@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_in_sight_are_attention_itself(kind):
    found = run_graph(kind, graph(61, 8, 8, 0), {}, feeds(61, 8, 8, 0))
    assert relative_l2(found["y"], found["dense"]) <= 1e-6
    assert np.allclose(found["recall"], 1, atol=1e-6)


def test_flops_are_those_of_the_blocks_that_are_seen():
    whole, block = graph(64, 8, 8, 0), graph(64, 6, 4, 2)
    dense = 4 * 2 * 4 * 8 * 64 * 64
    recall = dense // 2
    assert flops(whole) == 2 * dense + recall
    assert flops(block) == dense + recall + dense * (2 * 8 + 6 * 4) // 64


def test_a_table_of_other_rows_is_refused():
    with pytest.raises(GraphError, match="expected int32 of 7 rows"):
        graph(64, 8, 4, 1)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_has_itself_its_nearest_and_the_ends(seed):
    rng = np.random.default_rng(seed)
    grid = tuple(int(n) for n in rng.integers(1, 31, 3))
    size = int(2 ** rng.integers(3, 10))
    extra, kept_frame = int(rng.integers(0, 40)), bool(rng.integers(2))
    count = math.prod(grid)
    fixed = np.arange(count + extra) >= count
    fixed[: count // grid[0]] |= kept_frame
    share = float(rng.uniform(0.05, 1))
    plan = block_plan(grid, fixed, Density(share, size))
    blocks = -(-len(fixed) // size)
    ends = -(-int(fixed.sum()) // size)
    if plan is None:
        assert blocks < 8 or ends + math.ceil(share * (blocks - ends)) >= blocks
        return
    b = plan.blocks
    assert (b.ends, b.rows, b.kept) == (ends, blocks - ends, ends + math.ceil(share * b.rows))
    assert np.array_equal(np.sort(plan.order), np.arange(len(fixed)))
    assert np.array_equal(plan.order[plan.inverse], np.arange(len(fixed)))
    assert fixed[plan.order[: fixed.sum()]].all()
    assert plan.table.shape == (b.rows, b.kept) and plan.table.dtype == np.int32
    assert (np.diff(plan.table, axis=1) > 0).all() and plan.table.max() < blocks
    assert (plan.table[:, :ends] == np.arange(ends)).all()
    assert (plan.table == ends + np.arange(b.rows)[:, None]).any(axis=1).all()


def test_nearest_blocks_are_those_of_frames_rows_and_columns():
    """Two frames of 8 x 12 x 6 tokens at a time: the halves of a clip see their own half first."""
    grid = (64, 12, 6)
    plan = block_plan(grid, np.zeros(64 * 72, bool), Density(0.25))
    assert plan is not None and plan.blocks.kept == 3
    frames = plan.order.reshape(9, 512) // 72
    assert np.array_equal(plan.table[:, 1][1:-1], np.arange(9)[1:-1])
    assert (np.diff(frames.mean(axis=1)) > 0).all()


@pytest.mark.parametrize("tokens", [64, 61])
@pytest.mark.parametrize("axis", ["tokens", "heads"])
def test_tokens_and_heads_may_be_cut(axis, tokens):
    """In a block of its own, as the transformer has it: tokens are traded for heads and back."""

    def model(o):
        def body(o, carry, invariant, data):
            x = carry["x"]
            q, k, v = (
                o.linear(x, n, {"heads": 4, "head_dim": 8}, bias=False) for n in ("q", "k", "v")
            )
            y = o.block_attention(q, k, v, invariant["table"], scale=0.4, size=8, ends=1)
            return {
                "x": o.linear(y, "out", {"D": 16}, contract=("heads", "head_dim"), bias=False)
            }, {}

        x = o.input("x", "float32", B=2, tokens=tokens, D=16)
        blocks = o.input("table", "int32", blocks=7, seen=4)
        out, _ = o.repeat(body, 2, {"x": x}, {"table": blocks}, prefix="layer.*.")
        return out

    whole = trace("sparse", model, "float32")
    placed = place(whole, {axis: "tensor"}, {"tensor": 2})
    x = {
        "x": RNG.standard_normal((2, tokens, 16), np.float32),
        "table": table(7, 1, 4),
    }
    params = {
        name: RNG.standard_normal(spec.shape, np.float32) / 4
        for name, spec in whole.parameters().items()
    }
    expected = interpret(whole, params, x)["x"]
    assert relative_l2(interpret(placed, params, x)["x"], expected) <= 1e-6
    inside = [n for node in placed.nodes if node.op == "repeat" for n in node.repeat.body.nodes]
    (sparse,) = (n for n in inside if n.op == "block_attention")
    assert sparse.inputs[0].type.sizes["heads"] == 2
    assert sparse.inputs[0].type.sizes["tokens"] == tokens
