"""What a graph costs, against counts made by hand."""

import pytest

from ltx2rt.graph import trace
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.placement.cost import (
    RECEIVED,
    Traffic,
    activation_bytes,
    by_kind,
    exchanges,
    flops,
    weight_bytes,
)


def collective(name: str, parts: int):
    """One communication of a float32 (B, tokens) of 48 numbers on each of `parts` devices."""
    attrs = {
        "all_reduce": {},
        "all_gather": {"axis": "tokens", "parts": parts},
        "all_to_all": {"split": 0, "concat": 1, "parts": parts},
    }[name]

    def model(o):
        found = o.emit(name, o.input("x", B=4, tokens=12), mesh_axis="tensor", **attrs)
        return {"y": found[0] if isinstance(found, tuple) else found}

    graph = trace(name, model, "float32")
    graph.mesh = {"tensor": parts}
    return graph


def test_every_collective_says_what_a_device_receives():
    assert set(RECEIVED) == set(COLLECTIVES)
    assert all(received(1) == 0 for received in RECEIVED.values())  # one device hears nothing


@pytest.mark.parametrize("name, parts, received", [
    # Of an all-reduce a device receives a part of every other's numbers, then every other's
    # part of the sums.
    ("all_reduce", 2, 2 * 96),
    ("all_reduce", 4, 2 * 3 * 48),
    # Everything that every other device has.
    ("all_gather", 2, 192),
    ("all_gather", 4, 3 * 192),
    # Of every other device the part that is for this one.
    ("all_to_all", 2, 96),
    ("all_to_all", 4, 3 * 48),
])  # fmt: skip
def test_a_device_receives_what_the_others_send_it(name, parts, received):
    assert by_kind(exchanges(collective(name, parts))) == {name: Traffic(1, 192, received)}


def test_multiplications_and_additions_count_two():
    x = {"B": 2, "tokens": 3, "D": 4}
    grid = {"frames": 3, "rows": 4, "columns": 5}
    sound = lambda o: o.input("x", B=2, channels=3, time=9)  # noqa: E731

    def attention(o):
        q = o.input("q", B=2, tokens=3, heads=4, head_dim=8)
        return o.attention(
            q, *(o.input(n, B=2, text=7, heads=2, head_dim=8) for n in "kv"), scale=1.0
        )

    def neighbourhood(o):
        qkv = (o.input(n, B=2, **grid, heads=2, head_dim=8) for n in "qkv")
        return o.neighbourhood_attention(*qkv, window=(1, 3, 3), first=(0, 0, 0), scale=1.0)

    for model, expected in (
        (lambda o: o.linear(o.input("x", **x), "w", {"ff": 5}), 2 * 2 * 3 * 4 * 5),
        (lambda o: o.conv(sound(o), "c", 5, (3,), (2,)), 2 * 2 * 5 * 4 * 3 * 3),
        (lambda o: o.conv_transpose(sound(o), "c", 5, 4, 2), 2 * 2 * 9 * 3 * 5 * 4),
        (attention, 2 * 2 * (2 * 4 * 3 * 7 * 8)),
        (neighbourhood, 2 * 2 * (2 * 3 * 4 * 5 * 2 * 8) * 9),
        (lambda o: o.square(o.input("x", **x)), 0),
    ):
        graph = trace("net", lambda o, model=model: {"y": model(o)}, "float32")
        assert flops(graph) == expected, graph.nodes[0].op


def test_a_value_is_alive_until_its_last_reader_and_a_view_has_no_memory():
    def block(o, carry, invariant, data):
        return {"x": o.linear(carry["x"], "w", {"D": 4})}, {}

    def model(o):
        x = o.input("x", B=2, D=4)
        view = o.rename(x, names={"D": "E"})
        # The input, its square, the result; and inside.
        y = o.repeat(block, 3, {"x": o.square(x)}, prefix="blocks.*.")[0]["x"]
        return {"y": o.add(y, o.rename(view, names={"E": "D"}))}

    graph = trace("net", model, "float32")
    assert activation_bytes(graph) == (3 + 2) * 32  # a block's input and its result
    assert weight_bytes([graph, graph]) == 3 * (4 * 4 + 4) * 4


def test_iterations_read_what_they_share_where_it_is():
    def block(o, carry, invariant, data):
        return {"x": o.mul(o.add(carry["x"], invariant["y"]), data["z"])}, {}

    def model(o):
        x, y, z = o.input("x", D=8), o.input("y", D=8), o.input("z", layers=3, D=8)
        return {"x": o.repeat(block, 3, {"x": x}, {"y": y}, {"z": z}, prefix="blocks.*.")[0]["x"]}

    inputs, result, in_a_block = (1 + 1 + 3) * 32, 32, 3 * 32  # its x, a sum, a product
    assert activation_bytes(trace("net", model, "float32")) == inputs + result + in_a_block
