"""hoist and loop: all steps in one graph equal the step called again and again, and what need not
repeat does not."""

from collections import Counter
from functools import cache

import numpy as np
import pytest

from ltx2rt.commands.graph import component_graph
from ltx2rt.graph import trace
from ltx2rt.graph.interpret import interpret
from ltx2rt.models.samplers import PER_STEP
from ltx2rt.passes.hoist import hoist
from ltx2rt.passes.loop import looped, taken_apart
from ltx2rt.passes.pack import pack
from ltx2rt.pipelines.one_stage import OneStage
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.weights.presets import preset
from tests.conftest import assert_near
from tests.parity import relative_l2
from tests.placed_cases import Case, case

STATE = ("video_latent", "audio_latent")
SIGMAS = np.array([[1, 0.8], [0.8, 0.5], [0.5, 0.2]], np.float32)
CLOSE = 1e-5  # three float32 steps: matrix products in other batches


@cache
def step_by_step(one) -> dict[str, np.ndarray]:
    """The oracle: the state after the last step, and every step's x0."""
    state, found = {n: one.inputs[n] for n in STATE}, []
    for pair in SIGMAS:
        now = one.inputs | state | {"sigmas": pair}
        found.append(interpret(one.graph, one.params, now))
        state = {n: found[-1][n] for n in STATE}
    return state | {n: np.stack([f[n] for f in found]) for n in one.graph.outputs if n not in STATE}


def all_steps(one):
    return looped(one.graph, "denoise", len(SIGMAS), PER_STEP)


def in_loop(graph) -> Counter:
    """Ops that run in every step, by op."""
    return Counter(node.op for node, _ in taken_apart(graph).body.walk())


@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
def test_the_loop_equals_its_steps_hoisted_or_not(generation):
    one = case(f"guided-{generation}")
    expected = step_by_step(one)
    for graph in (all_steps(one), hoist(all_steps(one)), pack(hoist(all_steps(one)))):
        actual = interpret(graph, one.params, one.inputs | {"sigmas": SIGMAS})
        assert_near(actual, expected, CLOSE)


@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.slow), "2.3"])
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"tensor": 2}, marks=pytest.mark.long),
        {"sequence": 2},
        {"tensor": 2, "sequence": 2},
        pytest.param({"sequence": 4}, marks=pytest.mark.long),
    ],
)
def test_the_placed_loop_equals_its_steps(mesh, generation):
    one = case(f"guided-{generation}")
    graph = Placement(PROFILES["cpu"], mesh).loop(one.graph, len(SIGMAS))
    slots = graph.inputs["sigmas"].type.shape[0]
    sigmas = np.pad(SIGMAS, ((0, slots - len(SIGMAS)), (0, 0)), mode="edge")
    actual = interpret(graph, one.params, one.inputs | {"sigmas": sigmas})
    expected = step_by_step(one)
    for name in ("video_x0", "audio_x0"):  # the state goes on through the empty slots
        assert relative_l2(actual[name][: len(SIGMAS)], expected[name]) <= CLOSE, name


def test_rope_tables_and_modulation_rows_leave_the_loop():
    one = case("guided-2.3")
    before, after = in_loop(all_steps(one)), in_loop(hoist(all_steps(one)))
    assert after["sinusoid"] == 0 < before["sinusoid"]
    # Cos and sin of three video axes, and of three tables of one axis.
    assert before["take"] - after["take"] == 12
    assert all(node.op != "rope" for node in hoist(all_steps(one)).nodes)


def test_a_prompt_that_no_timestep_modulates_is_projected_once():
    one = case("guided-2.0")
    graph = hoist(all_steps(one))
    blocks = graph.repeats[0].body
    names = {v.name.split("transformer_blocks.*.")[1] for v in blocks.params.values()}
    parts = ("to_k.weight", "to_k.bias", "to_v.weight", "to_v.bias", "k_norm.weight")
    assert names == {f"{s}attn2.{part}" for s in ("", "audio_") for part in parts}
    left = taken_apart(graph).body.all_params()
    assert not any("attn2.to_k" in name or "caption" in name for name in left)
    modulated = hoist(all_steps(case("guided-2.3")))
    assert any("attn2.to_k" in name for name in taken_apart(modulated).body.all_params())


@pytest.mark.parametrize("more", [0, -1])
def test_a_prompts_keys_and_values_stay_where_they_are_too_large(more):
    """Nothing else does: RoPE tables and modulation rows leave the loop whatever they take."""
    one = case("guided-2.0")
    repeats = (node for node in hoist(all_steps(one)).nodes[:-1] if node.op == "repeat")
    size = sum(v.type.nbytes for node in repeats for v in node.outputs)
    graph = hoist(all_steps(one), size + more)
    assert in_loop(graph) == in_loop(hoist(all_steps(one), 10**12 if more == 0 else 0))
    parts = taken_apart(graph)
    assert bool(parts.before.repeats) == (more == 0) and in_loop(graph)["sinusoid"] == 0
    actual = interpret(graph, one.params, one.inputs | {"sigmas": SIGMAS})
    assert_near(actual, step_by_step(one), CLOSE)


@pytest.mark.parametrize("tokens,stays", [(2**18, 0), (2**18 - 1, 1)])
def test_prompts_are_cast_before_the_loop_and_what_is_small_where_it_is_read(tokens, stays):
    def step(o):
        text = o.cast(o.input("text", "float32", text=tokens, D=4), dtype="bfloat16")
        x = o.input("x", D=4)
        return {"x": o.add(x, o.mean(o.mul(text, x), over=("text",)))}

    graph = hoist(looped(trace("step", step, "bfloat16"), "denoise", 2, ()))
    assert in_loop(graph)["cast"] == stays and len(graph.nodes) == 2 - stays


def test_every_parameter_is_read_before_the_loop_or_in_it():
    one = case("guided-2.3")
    graph = hoist(all_steps(one))
    parts = taken_apart(graph)
    assert graph.parameters() == one.graph.parameters()
    assert parts.before.parameters() | parts.body.parameters() == one.graph.parameters()


def test_a_body_that_depends_on_its_state_alone_keeps_everything():
    def step(o):
        x = o.input("x", D=4)
        return {"x": o.linear(x, "proj", {"D": 4})}

    graph = looped(trace("step", step, "float32"), "steps", 3, ())
    assert [node.op for node in hoist(graph).nodes] == ["repeat"]


def test_rows_of_all_steps_are_one_product():
    def step(o):
        x, t = o.input("x", D=4), o.input("t", levels=2)
        row = o.linear(o.cast(o.sinusoid(t, size=8), dtype="float32"), "rows", {"D": 4})
        return {"x": o.add(x, o.at(o.silu(row), axis="levels", index=1))}

    graph = looped(trace("step", step, "float32"), "steps", 3, ("t",))
    moved = hoist(graph)
    (product,) = [node for node in moved.nodes if node.op == "linear"]
    assert product.outputs[0].type.axes == ("steps", "levels", "D")
    Case.drawn(graph).agrees(moved, CLOSE)


def test_a_mask_of_padding_goes_with_what_leaves_the_loop():
    """3 video tokens on 2 devices are padded; hoisted nodes read the mask."""
    config = preset("tiny-2.3").config
    clip = OneStage("a clip", width=32, height=32, num_frames=17)
    graph = component_graph(config, "denoise", clip, 4, "cpu", {"sequence": 2, "tensor": 2})
    unlooped = component_graph(config, "guided-step", clip, 4, "cpu", {"sequence": 2, "tensor": 2})
    assert graph.parameters().keys() == unlooped.parameters().keys()
