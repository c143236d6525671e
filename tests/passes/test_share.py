"""A shared guided step gives the values of the unshared one, with the work and the parts of its
stack promised."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest

from ltx2rt.graph.interpret import interpret
from ltx2rt.models import guided_step, transformer
from ltx2rt.models.catalog import CATALOG
from ltx2rt.models.geometry import Geometry
from ltx2rt.models.guided_step import Branches, StepShape
from ltx2rt.passes.pack import pack
from ltx2rt.passes.place import place
from ltx2rt.passes.quantise import quantise
from ltx2rt.passes.share import share
from ltx2rt.passes.unroll import unroll
from ltx2rt.placement.cost import by_kind, exchanges, flops
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.weights.presets import preset
from tests.conftest import assert_near, assert_same
from tests.parity import run_graph
from tests.placed_cases import (
    AUDIO_TOKENS,
    TEXT,
    TOKENS,
    Case,
    attention_weights,
    positions,
    transformer_config,
)

CLOSE = 1e-6  # float32: products of fewer rows; guidance multiplies their rounding by the scales
LAYERS = 4
GUIDANCE = np.array([[2, 0.5, 1.5, 0.7], [2, 0.5, 1.5, 0.4]], np.float32)
ALL = Branches(True, True, True)
COMBINATIONS = [Branches(*flags) for flags in product((False, True), repeat=3) if any(flags)]


@cache
def step(branches=ALL, blocks=(2,), generation="2.3", levels=(1, 1), **more):
    """A step's unshared graph, parameters and inputs. levels: of both streams' timesteps."""
    config = replace(transformer_config(generation), num_layers=LAYERS)
    feeds = transformer.position_feeds(config, *positions())
    shape = StepShape(
        branches, TOKENS, AUDIO_TOKENS, TEXT, transformer.coordinate_counts(feeds), *levels,
        stg_blocks=blocks if branches.perturbed else (), **more,
    )  # fmt: skip
    graph = guided_step.trace(config, shape, "float32")
    feeds |= {"sigmas": np.array([0.8, 0.6], np.float32), "guidance": GUIDANCE}
    feeds["video_attention_mask"] = attention_weights(TOKENS)
    for name, count, n in zip(("video", "audio"), (TOKENS, AUDIO_TOKENS), levels, strict=True):
        mask = np.linspace(1, 0.3, n)[np.arange(count) % n]
        feeds |= guided_step.mask_feeds(name, mask)
    found = Case.drawn(graph, feeds)
    return graph, found.params, found.inputs


def stored(graph):
    """What a device holds: stages of other branches share it."""
    params = {name: (v.type, count) for name, (v, count) in graph.all_params().items()}
    return params, graph.all_layouts()


def agree(graph, shared, params, inputs, kind="numpy"):
    assert shared is not graph and flops(shared) < flops(graph)
    assert shared.parameters() == graph.parameters() and stored(pack(shared)) == stored(pack(graph))
    expected, found = (run_graph(kind, g, params, inputs) for g in (graph, shared))
    assert_near(found, expected, CLOSE)


def stacks(graph):
    """(first, count) of each repeat, and how many entries enter it."""
    entries = (next(iter(r.body.inputs.values())).type.size("B") for r in graph.repeats)
    return [(r.first, r.count, n) for r, n in zip(graph.repeats, entries, strict=True)]


@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
@pytest.mark.parametrize("branches", COMBINATIONS, ids=lambda b: "+".join(b.names))
def test_every_combination_of_branches_keeps_its_values(branches, generation):
    graph, params, inputs = step(branches, generation=generation)
    agree(graph, share(graph), params, inputs)


@pytest.mark.parametrize("blocks,expected", [
    ((0,), [(0, 4, 4)]),
    ((2,), [(0, 2, 3), (2, 2, 4)]),
    ((3,), [(0, 3, 3), (3, 1, 4)]),
    ((1, 3), [(0, 1, 3), (1, 3, 4)]),
    ((0, 1, 2, 3), [(0, 4, 4)]),
])  # fmt: skip
def test_blocks_are_divided_where_classes_part(blocks, expected):
    """The perturbed branch is the conditional one up to its first perturbed block."""
    graph, params, inputs = step(blocks=blocks)
    shared = share(graph)
    assert stacks(shared) == expected
    agree(graph, shared, params, inputs)


@pytest.mark.parametrize("row,column,scale", [(0, 1, 0), (1, 1, 0), (0, 2, 1)])
def test_a_scale_that_is_neutral_for_one_modality_is_data(row, column, scale):
    graph, params, inputs = step()
    guidance = GUIDANCE.copy()
    guidance[row, column] = scale
    agree(graph, share(graph), params, inputs | {"guidance": guidance})


@pytest.mark.parametrize("more", [
    dict(levels=(3, 2)), dict(masked=True), dict(videos=2), dict(sampler="res2s"), dict(frozen=("audio",)),
    dict(videos=2, levels=(2, 1), generation="2.0"), dict(branches=Branches(), videos=2),
], ids=str)  # fmt: skip
def test_images_masks_videos_and_frozen_streams_keep_their_values(more):
    graph, params, inputs = step(**more)
    agree(graph, share(graph), params, inputs)


@pytest.mark.parametrize(
    "kind,layers,blocks",
    [
        ("cuda", "scan", 2),
        pytest.param("cuda", "unrolled", 2, marks=pytest.mark.long),
        ("tpu", "scan", 0),
    ],
)
def test_backends_run_the_shared_step(kind, layers, blocks):
    """JAX takes a second to compile a part of the stack, and gets two parts."""
    graph, params, inputs = step(blocks=(blocks,))
    expected = run_graph("numpy", graph, params, inputs)
    assert_near(run_graph(kind, share(graph), params, inputs, layers), expected, CLOSE)


def test_written_out_it_is_the_same():
    graph, params, inputs = step()
    shared = share(graph)
    expected = interpret(shared, params, inputs)
    assert_same(interpret(unroll(shared), params, inputs), expected)


@pytest.mark.parametrize(
    "mesh",
    [
        {"tensor": 2},
        {"sequence": 2},
        pytest.param({"sequence": 3, "tensor": 2}, marks=pytest.mark.long),
        pytest.param({"fsdp": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("generation", [pytest.param("2.0", marks=pytest.mark.long), "2.3"])
def test_a_placed_step_communicates_no_more(mesh, generation):
    graph, params, inputs = step(generation=generation, levels=(3, 2))
    on = Placement(PROFILES["trillium"], mesh)
    placed = place(graph, on.rules("transformer", weights=False), mesh)
    shared = share(placed)
    before, after = by_kind(exchanges(placed)), by_kind(exchanges(shared))
    assert before.keys() == after.keys()
    for name in before:
        assert after[name].count <= before[name].count, name
        assert after[name].bytes <= before[name].bytes, name
    less = sum(t.bytes for t in after.values()) < sum(t.bytes for t in before.values())
    assert less or "fsdp" in mesh
    agree(placed, shared, params, inputs)
    local = on.local(graph, "transformer")
    expected = interpret(graph, params, inputs)
    assert_near(interpret(local, params, inputs), expected, 1e-5)  # the tolerance of placed graphs


def test_quantised_blocks_are_shared_too():
    """Float8 rounds equal rows alike. The first block is computed once up to its text."""
    graph, params, inputs = step()
    quantised = quantise(graph, "float8")
    shared = share(quantised)
    assert flops(shared) < flops(share(graph))
    expected = interpret(quantised, params, inputs)
    # A float32 rounding may become one of e4m3.
    assert_near(interpret(shared, params, inputs), expected, 0.02)


@pytest.mark.parametrize("mesh", [{"guidance": 2}, {"guidance": 2, "tensor": 2}], ids=str)
def test_branches_on_devices_of_their_own_are_not_shared(mesh):
    graph, *_ = step()
    local = Placement(PROFILES["trillium"], mesh).local(graph, "transformer")
    assert stacks(local) == [(0, LAYERS, 2)]


def test_what_a_frozen_stream_does_not_use_stays_in_the_graph():
    """The audit holds the parameters that the loop reads against the checkpoint's."""
    graph, *_ = step(frozen=("audio",))
    loop = Placement(PROFILES["single"]).loop(graph, 2)
    assert loop.parameters() == graph.parameters()


def test_nothing_to_share_is_the_graph_itself():
    graph, *_ = step(Branches())
    assert share(graph) is graph


def heavy(graph, part):
    """Runs of linears with `part` in their parameter's name, by entries of the batch."""
    found = Counter()
    for node, times in graph.walk():
        if node.op == "linear" and part in node.inputs[1].name:
            found[node.inputs[0].type.size("B")] += times
    return found


@cache
def published():
    """LTX-2.3's stage 1 of 768x512x121, four branches, shared and not."""
    model = preset("ltx-2.3").config
    row = CATALOG["guided-step"]
    shape = row.sizes(model, Geometry.of(model, 384, 256, 121, Fraction(24)), 4)
    graph = row.trace(model, shape, "bfloat16")
    return graph, Placement(PROFILES["single"]).local(graph, "transformer")


def test_the_published_step_does_no_work_twice():
    graph, shared = published()
    assert round(flops(graph) / 1e12, 1) == 191.9
    assert round(flops(shared) / 1e12, 1) == 152.8
    assert stacks(shared) == [(0, 28, 3), (28, 20, 4)]
    assert heavy(shared, "*.attn1.to_q") == {3: 28, 4: 20}
    assert heavy(shared, "*.attn2.to_k") == {2: 48}
    # The isolated branch has none.
    assert heavy(shared, "audio_to_video_attn.to_q") == {2: 28, 3: 20}
    assert heavy(shared, "diffusion_model.patchify_proj") == {1: 1}
