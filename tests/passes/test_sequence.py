"""Tokens and guidance branches split between devices give the values of one, with the communication
promised."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from ltx2rt.graph.interpret import interpret
from ltx2rt.models import guided_step, transformer
from ltx2rt.placement.cost import traffic
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.testing import random_params
from ltx2rt.weights.presets import preset
from tests.conftest import assert_near, refused
from tests.placed_cases import MASKED, Case, attention_weights, case
from tests.virtual import on_devices

CLOSE = 1e-5  # float32: another order of summation
MESHES = (
    {"sequence": 2}, {"sequence": 3}, {"sequence": 4}, {"tensor": 2, "sequence": 3},
    {"sequence": 2, "tensor": 2}, {"guidance": 2}, {"guidance": 2, "tensor": 3},
    {"guidance": 2, "sequence": 3, "tensor": 2},
)  # fmt: skip
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")


def on(mesh, graph, audio="replicated"):
    return Placement(replace(PROFILES["trillium"], audio=audio), mesh).local(graph, "transformer")


def executed(graph):
    return Counter(
        {op: sum(times for node, times in graph.walk() if node.op == op) for op in COLLECTIVES}
    )


def agree(one, mesh, audio="replicated"):
    local = on(mesh, one.graph, audio)
    assert local.mesh == mesh
    found = interpret(local, one.params, one.inputs)
    assert_near(found, one.expected, CLOSE)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["guided-2.0", "guided-2.3", "forward-2.3", MASKED])
def test_split_tokens_give_the_values_of_one_device(name, mesh):
    """Image tokens, STG, isolation, a self-attention mask, unequal positions."""
    agree(case(name), mesh)


@pytest.mark.parametrize("mesh", ({"guidance": 4}, {"guidance": 4, "sequence": 2}), ids=str)
def test_each_branch_on_its_own_device_gives_the_values_of_one_device(mesh):
    agree(case("guided-2.3"), mesh)


@pytest.mark.parametrize("mesh", ({"sequence": 2}, {"sequence": 3, "tensor": 2}), ids=str)
@pytest.mark.parametrize("name", ["guided-2.0", "guided-2.3", "forward-2.3", MASKED])
def test_split_sound_gives_the_values_of_one_device(name, mesh):
    """Seven audio tokens are padded on 2 and 3 devices, 12 of video are not."""
    agree(case(name), mesh, "split")


def test_many_queries_gather_few_keys_and_few_queries_trade():
    """Video to sound gathers, sound to video and each to itself trade tokens for heads."""
    config = preset("ltx-2.0").config.transformer
    structure = guided_step.StepShape(
        guided_step.Branches(), 6144, 126, 1024, (16, 16, 24, 16, 126, 126)
    )
    local = on({"sequence": 8}, guided_step.trace(config, structure, "bfloat16"), "split")
    assert executed(local) == Counter(all_to_all=6 * 48, all_gather=2 * 48 + 2)


def uneven(rng):
    """A config, 13 video tokens, 7 audio tokens and their position feeds."""
    config, tokens = preset("tiny-2.3").config.transformer, 13
    config = replace(config, num_heads=12, audio_num_heads=12, head_dim=8, audio_head_dim=4)
    start = rng.integers(0, 9, (3, tokens)).astype(np.float32)
    video, audio = (np.stack([x, x + 1], -1) for x in (start, np.arange(7, dtype=np.float32)[None]))
    return config, tokens, transformer.position_feeds(config, video, audio)


@cache
def uneven_masked() -> Case:
    rng = np.random.default_rng(6)
    config, tokens, feeds = uneven(rng)
    for name, count in (("video", tokens), ("audio", 7)):
        feeds |= transformer.level_feeds(name, rng.choice([0.2, 0.5, 0.9], (2, count)))
    levels = (feeds[f"{name}_levels"].shape[1] for name in ("video", "audio"))
    counts = transformer.coordinate_counts(feeds)
    graph = transformer.trace(
        config, transformer.ForwardShape(2, tokens, 7, 5, counts, *levels, masked=True), "float32"
    )
    feeds = {
        name: feeds.get(name, rng.random(v.type.shape, np.float32))
        for name, v in graph.inputs.items()
    }
    return Case("transformer", graph, random_params(graph), feeds)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_mask_between_tokens_that_do_not_divide(mesh):
    agree(uneven_masked(), mesh)


@cache
def uneven_step(masked: bool) -> Case:
    rng = np.random.default_rng(5)
    config, tokens, feeds = uneven(rng)
    feeds |= guided_step.mask_feeds(
        "video", np.linspace(0, 1, tokens).round(1)
    ) | guided_step.mask_feeds("audio", np.ones(7))
    streams = ("video", tokens, 128, config.width), ("audio", 7, 128, config.audio_width)
    for name, count, channels, width in streams:
        feeds[f"{name}_latent"] = rng.standard_normal((1, count, channels))
        feeds[f"{name}_clean"] = rng.standard_normal((count, channels))
        feeds[f"{name}_context"] = rng.standard_normal((2, 5, width))
    feeds |= {
        "sigmas": np.array([0.8, 0.6]),
        "guidance": np.array([[3, 1, 3, 0.7], [7, 1, 3, 0.7]]),
    }
    if masked:
        feeds["video_attention_mask"] = attention_weights(tokens)
    branches, counts = guided_step.Branches(True, True, True), transformer.coordinate_counts(feeds)
    sizes = branches, tokens, 7, 5, counts, len(feeds["video_levels"])
    structure = guided_step.StepShape(*sizes, masked=masked, stg_blocks=(1,))
    graph = guided_step.trace(config, structure, "float32")
    return Case("transformer", graph, random_params(graph), feeds)


@pytest.mark.parametrize(
    ("sound", "masked"),
    [
        pytest.param("replicated", False, marks=pytest.mark.long),
        ("split", False),
        ("replicated", True),
    ],
)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_tokens_that_do_not_divide_are_padded_and_the_padding_is_not_seen(mesh, sound, masked):
    agree(uneven_step(masked), mesh, sound)


@pytest.mark.parametrize(
    ("mesh", "most", "most_bytes"),
    [({"sequence": 8}, 250, 2.7e9), ({"tensor": 2, "sequence": 4}, 500, 7.3e9)],
    ids=str,
)
def test_a_full_size_step_communicates_no_more_than_promised(mesh, most, most_bytes):
    """LTX-2.0, 6144 tokens: two all-to-alls, one gather a block, all-reduces."""
    config = preset("ltx-2.0").config.transformer
    structure = guided_step.StepShape(
        guided_step.Branches(True), 6144, 126, 1024, (16, 16, 24, 16, 126, 126)
    )
    graph = on(mesh, guided_step.trace(config, structure, "bfloat16"))
    found = executed(graph)
    reduces = 7 * 48 if "tensor" in mesh else 0
    assert found == Counter(all_to_all=2 * 48, all_gather=48 + 1, all_reduce=reduces)
    assert sum(found.values()) <= most
    assert 0.8 * most_bytes < sum(t.received_bytes for t in traffic(graph).values()) <= most_bytes


@pytest.mark.parametrize(
    "mesh", ({"guidance": 2}, {"guidance": 4}, {"guidance": 2, "tensor": 2}), ids=str
)
def test_branches_meet_only_at_the_output_projections(mesh):
    """One gather of each velocity; a device runs its share of the branches."""
    local = on(mesh, case("guided-2.3").graph)
    found = executed(local)
    assert found["all_gather"] == 2 and not found["all_to_all"]
    assert bool(found["all_reduce"]) == ("tensor" in mesh)
    gathered = [node.inputs[0].type for node in local.nodes if node.op == "all_gather"]
    assert {t.axes[-1] for t in gathered} == {"C"}
    (body,) = (node.args["repeat"].body for node in local.nodes if node.op == "repeat")
    assert {v.type.size("B") for v in body.inputs.values() if "B" in v.type.axes} == {
        4 // mesh["guidance"]
    }


@pytest.mark.parametrize("mesh", ({"guidance": 3}, {"guidance": 8}), ids=str)
def test_branches_that_do_not_divide_are_refused(mesh):
    parts = mesh["guidance"]
    with refused(f"4 branches do not divide over guidance={parts}; choose a divisor of 4"):
        on(mesh, case("guided-2.3").graph)


def test_branches_of_the_text_encoder_stay_together():
    """Its batch is the prompts, which the axis `guidance` does not split."""
    graph = case("text-2.3").graph
    assert not Placement(PROFILES["trillium"], {"guidance": 2}).local(graph, "text-encoder").mesh
    local = Placement(PROFILES["trillium"], {"guidance": 2, "tensor": 2}).local(
        graph, "text-encoder"
    )
    assert local.mesh == {"guidance": 2, "tensor": 2}
    assert {node.attrs["mesh_axis"] for node, _ in local.walk() if "mesh_axis" in node.attrs} == {
        "tensor"
    }


def test_heads_that_do_not_divide_are_refused():
    with refused("heads=12 on a device do not divide over sequence=5"):
        on({"sequence": 5}, case("guided-2.3").graph)


JAX = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from tests.placed_cases import MASKED, case
from ltx2rt.backend import get_backend
from ltx2rt.graph.interpret import interpret
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.testing import ArraySource, relative_l2
one = case(MASKED)
expected = one.expected
backend = get_backend("tpu", "cpu", {"guidance": 2, "tensor": 3})
for meshes in ([{"guidance": 2, "tensor": 3}, {"sequence": 2, "tensor": 3}], [{"fsdp": 2, "tensor": 3}]):
    graphs = [Placement(PROFILES["trillium"], mesh).local(one.graph, "transformer") for mesh in meshes]
    weights = backend.load(graphs[:1], ArraySource(one.params))
    for graph in graphs:
        program = backend.lower(graph)
        found = program(weights, one.inputs)
        print(max(relative_l2(backend.to_host(found[name]), expected[name]) for name in expected))
        for name, array in program._weights(weights).items():
            value, count = graph.all_params()[name]
            assert array.addressable_shards[0].data.nbytes == value.type.nbytes * count, name
            for here, there in zip(array.addressable_shards, weights[name].addressable_shards, strict=True):
                assert here.data.unsafe_buffer_pointer() == there.data.unsafe_buffer_pointer(), name
"""


@pytest.mark.slow
def test_jax_runs_it_under_shard_map():
    """On six virtual CPU devices, which must be asked for before jax starts: a process of its own.

    The second mesh, as of a stage with one branch, runs on the weights of the first without a copy;
    the third cuts weights both ways.
    """
    ran = on_devices(6, "-c", JAX, json.dumps(sys.path))
    distances = [float(line) for line in ran.split()]
    assert len(distances) == 3 and np.all(np.array(distances) <= CLOSE)


TORCH = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
import torch
torch.set_num_threads(1)
from tests.placed_cases import case
from ltx2rt.backend import get_backend
from ltx2rt.graph.interpret import interpret
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.testing import ArraySource, relative_l2
backend = get_backend("cuda", "cpu", {"guidance": 2, "tensor": 2})
meshes = (backend.mesh, {"sequence": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2})
for name, mesh in zip(("masked-2.3", "forward-2.3", "guided-2.0"), meshes):
    one = case(name)
    graph = Placement(PROFILES["hopper"], mesh).local(one.graph, "transformer")
    found = backend.lower(graph)(backend.load([graph], ArraySource(one.params)), one.inputs)
    expected = one.expected
    if backend.is_main:
        print(max(relative_l2(backend.to_host(found[key]), expected[key]) for key in expected))
"""


@pytest.mark.slow
def test_torch_runs_it_on_process_groups():
    """Four gloo ranks: two mesh axes with their groups, and a second mesh."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    words, ranks = [sys.executable, "-c", TORCH, json.dumps(sys.path)], []
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for rank in map(str, range(4)):
        own = env | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4"}
        ranks.append(subprocess.Popen(words, env=own, **how))
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    distances = [float(line) for line in outputs[0][0].split()]
    assert len(distances) == 3 and np.all(np.array(distances) <= CLOSE)
