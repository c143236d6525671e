"""Model text becomes a typed graph, or an error that speaks axis names before any weight is
read."""

import numpy as np
import pytest

from ltx2rt.errors import GraphError
from ltx2rt.graph import Ops, ParamSpec, trace
from ltx2rt.graph.interpret import interpret
from ltx2rt.graph.ir import tapped
from ltx2rt.graph.ops import OPS
from ltx2rt.graph.show import show
from ltx2rt.graph.verify import verify
from ltx2rt.passes.unroll import unroll


def graph_of(model, dtype="float32"):
    return trace("net", model, dtype)


def looped(block, count, *, o, data=None, invariant=None, **carry):
    """The last `x` that a repeat carries; the block gives that of each iteration."""

    def body(o, carry, invariant, data):
        return {"x": block(o, carry["x"], invariant | data)}, {}

    return o.repeat(body, count, carry, invariant, data, prefix="layers.*.")[0]["x"]


def x_of(o, name="x", dtype=None, **sizes):
    return o.input(name, dtype, **(sizes or {"B": 2, "tokens": 5, "D": 6}))


def refused(model, message: str):
    with pytest.raises(GraphError, match=message):
        graph_of(lambda o: {"y": model(o)})


def product(o, name: str, **sizes):
    plan = {"contract": ("D",), "out": {"D": 4}}
    return o.emit("linear", x_of(o), o.param(name, **sizes), **plan)


def masked(o):
    q = x_of(o, B=1, tokens=4, heads=2, head_dim=3)
    return o.attention(q, q, q, x_of(o, "mask", tokens=4, keys=4), scale=1.0)


@pytest.mark.parametrize("model, message", [
    (lambda o: product(o, "ff.w", **{"D": 4, "heads*head_dim": 6}),
     r"net: linear: input ends in \('D',\), weight contracts \('heads', 'head_dim'\) \(operands: x, ff"),
    (lambda o: o.emit("linear", x_of(o), o.param("w", out=4, D=7), contract=("D",), out={"out": 4}),
     r"f32\[B=2, tokens=5, D=6\] does not fit weight f32\[out=4, D=7\]"),
    (lambda o: o.under("blocks.3").add(x_of(o), x_of(o, "y", tokens=4)), r"^blocks\.3\.: add: axis tokens is 5 "),
    (lambda o: o.mul(x_of(o), x_of(o, "y", "bfloat16", D=6)),
     r"operands differ in dtype: f32\[.*\], bf16\[D=6\]; cast first"),
    (lambda o: o.take(x_of(o), x_of(o, "i", picked=3), axis="tokens"), "expected int32"),
    (lambda o: o.add(x_of(o), x_of(o, "y", D=6, tokens=5)), "does not fit the axes"),
    (lambda o: o.add(x_of(o), x_of(o, "y", heads=6)), "does not fit the axes"),
    (lambda o: o.add(x_of(o), x_of(o)), "net: input x is declared twice"),
    (masked, "tokens names queries and keys; rename the keys"),
])  # fmt: skip
def test_an_illegal_node_is_refused_in_axis_names(model, message):
    refused(model, message)


@pytest.mark.parametrize("model", [
    lambda o: o.split(x_of(o), axis="D", into={"heads": 4, "head_dim": 2}),
    lambda o: o.merge(x_of(o), axes=("B", "D"), into="both"),
    lambda o: o.transpose(x_of(o), axes=("B", "D")),
    lambda o: o.slice(x_of(o), axis="tokens", start=2, stop=6),
    lambda o: o.at(x_of(o), axis="tokens", index=5),
    lambda o: o.concat(x_of(o), x_of(o, "y", B=2, tokens=5, D=7), axis="tokens"),
    lambda o: o.stack(x_of(o), x_of(o, "y", B=2, tokens=4, D=6), axis="n", dim=0),
    lambda o: o.pad(x_of(o), mode="reflect", tokens=(5, 0)),
    lambda o: o.pad(x_of(o), mode="wrap", tokens=(1, 0)),
    lambda o: o.pad(x_of(o), rows=(1, 0)),
    lambda o: o.sum(x_of(o), over=("rows",)),
    lambda o: o.take(x_of(o), x_of(o, "i", "int32", D=3), axis="tokens"),
    lambda o: o.group_norm(x_of(o, B=1, channels=6, time=2), "n", groups=4, eps=1e-5),
    lambda o: o.rope(x_of(o), x_of(o, "cos", pairs=2), x_of(o, "sin", pairs=2)),
])  # fmt: skip
def test_illegal_shape_is_refused_when_traced(model):
    refused(model, "net: ")


def test_unknown_op_lists_the_table():
    with pytest.raises(
        AttributeError, match=r"o\.softmax: no such op; the table has add, affine, .*transpose"
    ):
        graph_of(lambda o: {"y": o.softmax(x_of(o))})


def test_parameter_declared_twice_is_shared_if_alike_and_refused_if_not():
    graph = graph_of(lambda o: {"y": o.add(o.param("table", D=3), o.param("table", D=3))})
    assert list(graph.params) == ["table"]
    refused(
        lambda o: o.add(o.param("table", D=3), o.param("table", D=4)),
        r"table: declared as f32\[D=3\] and as f32\[D=4\]",
    )


def test_parameters_of_a_repeat_are_listed_under_concrete_names():
    def block(o, x, _):
        x = o.rms_norm(x, "norm", over=("D",), eps=1e-6)
        return o.linear(x, "to_q", {"D": 6}, bias=False)

    def model(o):
        o = o.under("model")
        return {"y": looped(block, 2, o=o, x=o.linear(x_of(o), "in", {"D": 6}))}

    assert graph_of(model, "bfloat16").parameters() == {
        "model.in.weight": ParamSpec((6, 6), "bfloat16"),
        "model.in.bias": ParamSpec((6,), "bfloat16"),
        "model.layers.0.norm.weight": ParamSpec((6,), "bfloat16"),
        "model.layers.1.norm.weight": ParamSpec((6,), "bfloat16"),
        "model.layers.0.to_q.weight": ParamSpec((6, 6), "bfloat16"),
        "model.layers.1.to_q.weight": ParamSpec((6, 6), "bfloat16"),
    }


def test_walk_counts_the_executions_of_a_body():
    square = lambda o, x, _: o.square(x)  # noqa: E731
    graph = graph_of(lambda o: {"y": o.exp(looped(square, 5, o=o, x=x_of(o)))})
    assert {node.op: times for node, times in graph.walk()} == {"repeat": 1, "square": 5, "exp": 1}
    assert {node.op for node, _ in graph.walk()} <= set(OPS) | {"repeat"}


def test_carry_must_leave_as_it_entered():
    refused(
        lambda o: looped(lambda o, x, _: o.cast(x, dtype="bfloat16"), 2, o=o, x=x_of(o)),
        r"repeat gives %\d: f32\[B=2, tokens=5, D=6\] for x: bf16\[B=2, tokens=5, D=6\]",
    )


def test_data_must_lead_with_one_row_per_layer():
    def model(o, name="d", **sizes):
        times = lambda o, x, given: o.mul(x, given["d"])  # noqa: E731
        return looped(times, 3, o=o, x=x_of(o), data={name: x_of(o, "d", **sizes)})

    for sizes in ({"layers": 4}, {"rows": 3}):
        said = r"repeat passes d: f32\[.*\] to d: f32\[layers=3\]"
        refused(lambda o, sizes=sizes: model(o, **sizes), said)
    refused(lambda o: model(o, "x", layers=3), "repeat: x is given twice")


@pytest.mark.parametrize(
    "infix, ops",
    [
        (lambda o, x, y: x + y, lambda o, x, y: o.add(x, y)),
        (lambda o, x, y: x - y, lambda o, x, y: o.sub(x, y)),
        (lambda o, x, y: x * y / x, lambda o, x, y: o.div(o.mul(x, y), x)),
        (lambda o, x, y: 2 * (x * 3), lambda o, x, y: o.affine(o.affine(x, scale=3.0), scale=2.0)),
        (
            lambda o, x, y: 1 + (x - 0.5),
            lambda o, x, y: o.affine(o.affine(x, offset=-0.5), offset=1),
        ),
        (lambda o, x, y: x / 3, lambda o, x, y: o.affine(x, scale=1 / 3)),
        (lambda o, x, y: 1 - x, lambda o, x, y: o.affine(x, scale=-1.0, offset=1.0)),
    ],
)
def test_arithmetic_is_the_ops_written_out(infix, ops):
    def nodes(model):
        graph = graph_of(lambda o: {"z": model(o, x_of(o), x_of(o, "y", D=6))})
        operands = ([v.name for v in n.inputs] for n in graph.nodes)
        rows = zip(graph.nodes, operands, strict=True)
        return [(n.op, names, n.attrs, n.outputs[0].type) for n, names in rows]

    assert nodes(infix) == nodes(ops)


def test_arithmetic_in_a_body_is_recorded_in_the_body():
    def model(o):
        given = {"y": x_of(o, "y", D=6)}
        block = lambda o, x, given: x * 2 + given["y"]  # noqa: E731
        return {"y": looped(block, 3, o=o, x=x_of(o), invariant=given) - 1}

    graph = graph_of(model)
    assert [(node.op, times) for node, times in graph.walk()] == [
        ("repeat", 1), ("affine", 3), ("add", 3), ("affine", 1),
    ]  # fmt: skip


def test_arithmetic_across_graphs_and_with_what_is_no_number_is_refused():
    def model(o):
        outside = x_of(o, "y")
        return looped(lambda o, x, _: x + outside, 2, o=o, x=x_of(o))

    refused(model, "reads y: .*, which this graph does not define; pass it to repeat")
    refused(lambda o: x_of(o) * x_of(o, "y", "bfloat16"), "operands differ in dtype")
    with pytest.raises(TypeError):
        graph_of(lambda o: {"y": x_of(o) + None})


def test_a_number_everywhere_needs_no_operand():
    model = lambda o: {"y": o.full(0.5, B=2, D=3), "i": o.full(7, "int32", B=2)}  # noqa: E731
    graph = graph_of(model, "bfloat16")
    assert [str(v.type) for v in graph.outputs.values()] == ["bf16[B=2, D=3]", "i32[B=2]"]
    assert "%0 = full(value=0.5, dtype=bfloat16, B=2, D=3): bf16[B=2, D=3]" in show(graph)


def test_a_body_of_several_layers_names_each_by_its_place():
    def model(o):
        def pair(o, carry, invariant, data):
            x = carry["x"]
            for place in range(2):
                x = o.linear(x, f"layers.2*+{place}.proj", {"D": 3}, bias=False)
            return {"x": x}, {}

        return o.repeat(pair, 3, {"x": o.input("x", B=1, D=3)}, prefix="net.")[0]

    graph = trace("m", model, "float32")
    names = [f"net.layers.{layer}.proj.weight" for layer in range(6)]
    assert sorted(graph.parameters()) == sorted(unroll(graph).parameters()) == names
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((3, 3), np.float32) for name in names}
    x = rng.standard_normal((1, 3), np.float32)
    expected = x
    for name in names:
        expected = expected @ params[name].T
    for same in (graph, unroll(graph)):
        np.testing.assert_allclose(interpret(same, params, {"x": x})["x"], expected, rtol=1e-4)


def stacked(o: Ops):
    x = o.input("x", B=2, D=3)
    before = o.linear(x, "first", {"D": 3})

    def body(o, carry, invariant, data):
        return {"x": o.linear(carry["x"], "attn1.to_q", {"D": 3})}, {}

    carry, _ = o.repeat(body, 4, {"x": before}, prefix="blocks.*.")
    return {"y": carry["x"]}


@pytest.mark.parametrize("name", ["first", "attn1.to_q", "blocks.*.attn1.to_q", "x", "%0"])
def test_values_within_a_graph_are_read_by_name(name):
    graph = trace("net", stacked, "float32")
    rng = np.random.default_rng(0)
    params = {n: rng.standard_normal(p.shape) for n, p in graph.parameters().items()}
    given = {"x": rng.standard_normal((2, 3))}
    found = interpret(verify(tapped(graph, name)), params, given)
    np.testing.assert_array_equal(found["y"], interpret(graph, params, given)["y"])
    after = [given["x"] @ params["first.weight"].T + params["first.bias"]]
    for i in range(4):
        where = f"blocks.{i}.attn1.to_q"
        after.append(after[-1] @ params[f"{where}.weight"].T + params[f"{where}.bias"])
    expected = after[0] if name == "first" else after[:4] if name == "x" else after[1:]
    np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-5)


def test_a_name_that_the_graph_lacks_lists_its_modules():
    with pytest.raises(GraphError, match=r"named 'attn9'; its modules are attn1\.to_q, first"):
        tapped(trace("net", stacked, "float32"), "attn9")
