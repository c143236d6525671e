"""The interpreter is the oracle of the lowerings: here plain numpy is the interpreter's, on shapes
drawn at random."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ltx2rt.graph import trace
from ltx2rt.graph.interpret import interpret
from ltx2rt.passes.unroll import unroll
from tests.parity import random_params, run_graph

AXES = ("B", "tokens", "heads", "head_dim")
SHAPES = st.tuples(*[st.integers(1, 4)] * len(AXES))
fast = settings(max_examples=40, deadline=None)


def named(o, shape, name="x", dtype=None):
    """An input of the first of AXES."""
    return o.input(name, dtype, **dict(zip(AXES, shape, strict=False)))


def array_of(shape, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def check(model, inputs: dict, expected: np.ndarray) -> None:
    """The interpreter and the torch lowering, exactly: none of these ops rounds."""
    graph = trace("net", lambda o: {"y": model(o)}, "float32")
    for kind in ("numpy", "cuda"):
        actual = run_graph(kind, graph, {}, inputs)["y"]
        assert actual.shape == expected.shape and np.array_equal(actual, expected), kind


@fast
@given(
    SHAPES, st.sets(st.integers(0, 3)), st.sampled_from(["add", "sub", "mul", "div"]), st.booleans()
)
def test_binary_ops_broadcast_by_axis_name(shape, kept, name, swapped):
    x, kept = array_of(shape), sorted(kept)
    y = array_of([shape[i] for i in kept], seed=1) + np.float32(3)
    aligned = y.reshape([shape[i] if i in kept else 1 for i in range(4)])
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[name]

    def model(o):
        wide = named(o, shape)
        narrow = o.input("y", **{AXES[i]: shape[i] for i in kept})
        return o.emit(name, *((narrow, wide) if swapped and len(kept) < 4 else (wide, narrow)))

    expected = function(aligned, x) if swapped and len(kept) < 4 else function(x, aligned)
    check(model, {"x": x, "y": y}, expected)


@fast
@given(SHAPES, st.permutations(range(4)))
def test_transpose_moves_named_axes(shape, order):
    x = array_of(shape)
    axes = tuple(AXES[i] for i in order)
    check(lambda o: o.transpose(named(o, shape), axes=axes), {"x": x}, x.transpose(order))


@fast
@given(SHAPES, st.integers(0, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_split_puts_the_slowest_part_first_and_merge_undoes_it(shape, at, parts):
    shape = (*shape[:at], int(np.prod(parts)), *shape[at + 1 :])
    x = array_of(shape)
    into = {f"part{i}": n for i, n in enumerate(parts)}

    def halves(o):
        return o.split(named(o, shape), axis=AXES[at], into=into)

    index = np.indices([*shape[:at], *parts, *shape[at + 1 :]])
    flat = np.zeros_like(index[0])
    for i, n in enumerate(parts):
        flat = flat * n + index[at + i]
    check(halves, {"x": x}, x[(*index[:at], flat, *index[at + len(parts) :])])
    check(lambda o: o.merge(halves(o), axes=tuple(into), into="whole"), {"x": x}, x)


@fast
@given(SHAPES, st.integers(0, 3), st.integers(0, 3), st.lists(st.integers(1, 3), max_size=2))
def test_take_matches_leading_axes_by_name_and_replaces_the_taken_one(shape, at, batch, picked):
    batch = min(batch, at)
    x, rng = array_of(shape), np.random.default_rng(0)
    index = rng.integers(0, shape[at], (*shape[:batch], *picked), np.int32)
    names = (*AXES[:batch], *(f"picked{i}" for i in range(len(picked))))

    def model(o):
        sizes = dict(zip(names, index.shape, strict=True))
        return o.take(named(o, shape), o.input("i", "int32", **sizes), axis=AXES[at])

    expected = np.empty((*shape[:at], *picked, *shape[at + 1 :]), np.float32)
    for place in np.ndindex(*expected.shape):
        lead, inner, tail = place[:at], place[at : at + len(picked)], place[at + len(picked) :]
        expected[place] = x[(*lead, index[(*lead[:batch], *inner)], *tail)]
    check(model, {"x": x, "i": index}, expected)


@fast
@given(SHAPES, st.sampled_from(["zeros", "edge", "reflect"]), st.data())
def test_pad_widens_named_axes(shape, mode, data):
    limits = [n - 1 if mode == "reflect" else 3 for n in shape]
    widths = [(data.draw(st.integers(0, n)), data.draw(st.integers(0, n))) for n in limits]
    expected = x = array_of(shape)
    for dim, (n, (before, after)) in enumerate(zip(shape, widths, strict=True)):
        places = np.arange(-before, n + after)
        inside = np.clip(places, 0, n - 1)
        if mode == "reflect":
            inside = n - 1 - abs(n - 1 - abs(places))
        expected = np.take(expected, inside, axis=dim)
        if mode == "zeros":
            there = (places >= 0) & (places < n)
            expected = expected * there.reshape([-1 if i == dim else 1 for i in range(4)])
    by_axis = dict(zip(AXES, widths, strict=True))
    check(lambda o: o.pad(named(o, shape), mode=mode, **by_axis), {"x": x}, expected)


@fast
@given(SHAPES, st.integers(0, 3), st.data())
def test_slice_and_concat_take_an_axis_apart_and_together(shape, at, data):
    x = array_of(shape)
    cut = data.draw(st.integers(0, shape[at] - 1))

    def model(o):
        whole = named(o, shape)
        parts = [o.slice(whole, axis=AXES[at], start=cut)]
        if cut:
            parts.append(o.slice(whole, axis=AXES[at], stop=cut))
        return o.concat(*parts, axis=AXES[at])

    check(model, {"x": x}, np.roll(x, -cut, axis=at))


def test_bfloat16_is_rounded_once_after_every_op():
    a = array_of((64,)).astype(ml_dtypes.bfloat16)
    b = array_of((64,), seed=1).astype(ml_dtypes.bfloat16)

    def model(o):
        x, y = o.input("x", D=64), o.input("y", D=64)
        return {"sum": o.add(o.mul(x, y), y), "total": o.sum(o.mul(x, y), over=("D",))}

    actual = interpret(trace("net", model, "bfloat16"), {}, {"x": a, "y": b})
    wide, other = a.astype(np.float32), b.astype(np.float32)
    product = (wide * other).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(actual["sum"], (product + other).astype(ml_dtypes.bfloat16))
    assert actual["total"] == product.sum().astype(ml_dtypes.bfloat16)


def stack_of_layers():
    """x <- (x W_i + b_shared) d_i over 4 layers, every state given out."""

    def block(o, carry, invariant, data):
        x = o.mul(o.add(o.linear(carry["x"], "w", {"D": 3}, bias=False), invariant["b"]), data["d"])
        return {"x": x}, {"states": x}

    def model(o):
        x, b, d = o.input("x", tokens=2, D=3), o.input("b", D=3), o.input("d", layers=4)
        carry, outputs = o.repeat(block, 4, {"x": x}, {"b": b}, {"d": d}, prefix="layers.*.")
        return {"y": carry["x"], "states": outputs["states"]}

    return trace("net", model, "float32")


@pytest.mark.parametrize("form", [lambda graph: graph, unroll])
@pytest.mark.parametrize("kind", ["numpy", "cuda", "tpu"])
def test_repeat_threads_carries_weights_data_and_outputs(kind, form):
    graph = stack_of_layers()
    params = random_params(graph)
    inputs = {"x": array_of((2, 3)), "b": array_of((3,), 1), "d": array_of((4,), 2)}
    x, states = inputs["x"].astype(np.float64), []
    for i in range(4):
        x = (x @ params[f"layers.{i}.w.weight"].T + inputs["b"]) * inputs["d"][i]
        states.append(x)
    outputs = run_graph(kind, form(graph), params, inputs)
    np.testing.assert_allclose(outputs["y"], x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs["states"], np.stack(states), rtol=1e-5, atol=1e-6)


def test_misshapen_input_is_refused_by_name():
    graph = trace("net", lambda o: {"y": o.exp(o.input("x", D=4))}, "float32")
    with pytest.raises(ValueError, match=r"net: input x has shape \(5,\), expected f32\[D=4\]"):
        interpret(graph, {}, {"x": np.zeros(5)})
