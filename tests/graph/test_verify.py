"""Illegal graphs are refused, however they came about."""

from dataclasses import replace

import pytest

from ltx2rt.errors import GraphError
from ltx2rt.graph import Type, Value, trace
from ltx2rt.graph.verify import verify
from ltx2rt.passes.unroll import unroll


def graph_of():
    """y = repeat(x * gain + offset) over 3 layers, then exp."""

    def block(o, carry, invariant, data):
        x = o.add(o.mul(carry["x"], data["gain"]), invariant["offset"])
        return {"x": x}, {"seen": x}

    def model(o):
        x, gain, offset = o.input("x", D=4), o.input("gain", layers=3), o.input("offset", D=4)
        given = {"x": x}, {"offset": offset}, {"gain": gain}
        final, outputs = o.repeat(block, 3, *given, prefix="layers.*.")
        return {"y": o.exp(final["x"]), "seen": outputs["seen"]}

    return trace("net", model, "float32")


@pytest.mark.parametrize("kind", ["input", "param"])
def test_outer_value_captured_in_a_repeat_body_is_refused(kind):
    def model(o):
        x, outer = o.input("x", D=4), getattr(o, kind)("outer", D=4)
        return o.repeat(lambda o, c, i, d: ({"x": o.add(c["x"], outer)}, {}), 2, {"x": x})[0]

    message = r"add reads outer: f32\[D=4\], which this graph does not define; pass it to repeat"
    with pytest.raises(GraphError, match=message):
        trace("net", model, "float32")


def test_output_of_another_graph_is_refused():
    stray = Value("stray", Type(("D",), (4,), "float32"))
    with pytest.raises(GraphError, match="net: output y is not defined in this graph"):
        trace("net", lambda o: {"y": stray}, "float32")


def test_legal_graph_stays_legal_unrolled():
    graph = graph_of()
    verify(graph)
    verify(unroll(graph))
    assert "repeat" not in {node.op for node in unroll(graph).nodes}


def test_use_before_definition_is_refused():
    graph = graph_of()
    graph.nodes.reverse()
    with pytest.raises(GraphError, match="exp reads"):
        verify(graph)


def test_retyped_result_is_refused():
    graph = graph_of()
    node = graph.nodes[-1]
    wrong = Value("wrong", Type(("D",), (5,), "float32"))
    graph.nodes[-1] = replace(node, outputs=(wrong,))
    graph.outputs["y"] = wrong
    with pytest.raises(GraphError, match=r"exp is typed f32\[D=5\], its rule says f32\[D=4\]"):
        verify(graph)


def test_error_inside_a_repeat_body_is_found():
    graph = graph_of()
    graph.nodes[0].args["repeat"].body.nodes.reverse()
    with pytest.raises(GraphError, match=r"net\.layers\.\*: add reads"):
        verify(graph)


def test_repeat_with_a_missing_operand_is_refused():
    graph = graph_of()
    graph.nodes[0] = replace(graph.nodes[0], inputs=graph.nodes[0].inputs[:-1])
    with pytest.raises(GraphError, match="repeat passes 2 operands to 3 inputs"):
        verify(graph)


@pytest.mark.parametrize("position", range(3))
def test_repeat_with_a_mistyped_operand_is_refused(position):
    """Carry, invariant and data in turn are one row short."""
    graph = graph_of()
    node = graph.nodes[0]
    value = node.inputs[position]
    short = Value("short", Type(value.type.axes, (value.type.shape[0] - 1,), "float32"))
    graph.inputs[value.name] = short
    inputs = (*node.inputs[:position], short, *node.inputs[position + 1 :])
    graph.nodes[0] = replace(node, inputs=inputs)
    with pytest.raises(GraphError, match=r"repeat passes short: f32\[.*=\d\] to"):
        verify(graph)


def test_repeat_with_mistyped_results_is_refused():
    graph = graph_of()
    node = graph.nodes[0]
    wrong = Value("wrong", Type(("layers", "D"), (2, 4), "float32"))
    graph.nodes[0] = replace(node, outputs=(node.outputs[0], wrong))
    graph.outputs["seen"] = wrong
    with pytest.raises(
        GraphError, match=r"repeat gives wrong: f32\[layers=2, D=4\] for seen: f32\[layers=3, D=4\]"
    ):
        verify(graph)
