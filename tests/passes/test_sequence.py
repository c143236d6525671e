"""Sequence parallelism: tokens split between devices give the values of one device, with the communication promised."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from placed_cases import case

from ltx2rt.errors import InputError
from ltx2rt.graph.interpret import interpret
from ltx2rt.models import guided_step, transformer
from ltx2rt.placement.profiles import PROFILES, placed
from ltx2rt.testing import random_params, relative_l2
from ltx2rt.weights.presets import preset

CLOSE = 1e-5  # float32: another order of summation
MESHES = ({"sequence": 2}, {"sequence": 3}, {"sequence": 4}, {"tensor": 2, "sequence": 3}, {"sequence": 2, "tensor": 2})
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")


def on(mesh, graph):
    return placed(graph, "transformer", PROFILES["trillium"], mesh)


def executed(graph):
    return Counter({op: sum(times for node, times in graph.walk() if node.op == op) for op in COLLECTIVES})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["guided-2.0", "guided-2.3", "forward-2.3"])
def test_split_tokens_give_the_values_of_one_device(name, mesh):
    """Image tokens with their own timesteps, STG, isolation, a self-attention mask, unequal positions in a batch."""
    one = case(name)
    expected, found = (interpret(g, one.params, one.inputs) for g in (one.graph, on(mesh, one.graph)))
    for output in expected:
        assert relative_l2(found[output], expected[output]) <= CLOSE, output


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_tokens_that_do_not_divide_are_padded_and_the_padding_is_not_seen(mesh):
    config, tokens = preset("tiny-2.3").config.transformer, 13
    config = replace(config, num_heads=12, audio_num_heads=12, head_dim=8, audio_head_dim=4)
    rng = np.random.default_rng(5)
    start = rng.integers(0, 9, (3, tokens)).astype(np.float32)
    video, audio = (np.stack([x, x + 1], -1) for x in (start, np.arange(7, dtype=np.float32)[None]))
    feeds = transformer.position_feeds(config, video, audio)
    feeds |= guided_step.mask_feeds("video", np.linspace(0, 1, tokens).round(1)) | guided_step.mask_feeds(
        "audio", np.ones(7)
    )
    for name, count, channels, width in (("video", tokens, 128, config.width), ("audio", 7, 128, config.audio_width)):
        feeds[f"{name}_latent"] = rng.standard_normal((1, count, channels))
        feeds[f"{name}_clean"] = rng.standard_normal((count, channels))
        feeds[f"{name}_context"] = rng.standard_normal((2, 5, width))
    feeds |= {"sigmas": np.array([0.8, 0.6]), "guidance": np.array([[3, 1, 3, 0.7], [7, 1, 3, 0.7]])}
    feeds["stg_blocks"] = np.array([0, 1, 0])
    structure = guided_step.Structure(
        guided_step.Branches(True, True, True),
        tokens,
        7,
        5,
        transformer.coordinate_counts(feeds),
        len(feeds["video_levels"]),
    )
    graph = guided_step.trace(config, structure, "float32")
    params = random_params(graph)
    expected, found = (interpret(g, params, feeds) for g in (graph, on(mesh, graph)))
    for output in expected:
        assert relative_l2(found[output], expected[output]) <= CLOSE, output


@pytest.mark.parametrize(("mesh", "most"), [({"sequence": 8}, 250), ({"tensor": 2, "sequence": 4}, 500)], ids=str)
def test_a_full_size_step_communicates_no_more_than_promised(mesh, most):
    """LTX-2.0, 6144 video tokens, two branches: two all-to-alls and one gather a block, and tensor's all-reduces."""
    config = preset("ltx-2.0").config.transformer
    structure = guided_step.Structure(guided_step.Branches(True), 6144, 126, 1024, (16, 16, 24, 16, 126, 126))
    found = executed(on(mesh, guided_step.trace(config, structure, "bfloat16")))
    reduces = 7 * 48 if "tensor" in mesh else 0
    assert found == Counter(all_to_all=2 * 48, all_gather=48 + 1, all_reduce=reduces) and sum(found.values()) <= most


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="heads=12 on a device do not divide over sequence=5"):
        on({"sequence": 5}, case("guided-2.3").graph)


JAX = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from placed_cases import case
from ltx2rt.graph.interpret import interpret
from ltx2rt.placement.profiles import PROFILES, placed
from ltx2rt.testing import relative_l2, run_graph
one = case("guided-2.3")
expected = interpret(one.graph, one.params, one.inputs)
for mesh in ({"sequence": 4}, {"tensor": 2, "sequence": 2}):
    found = run_graph("tpu", placed(one.graph, "transformer", PROFILES["trillium"], mesh), one.params, one.inputs)
    print(max(relative_l2(found[name], expected[name]) for name in expected))
"""


def test_jax_runs_it_under_shard_map():
    """On four virtual CPU devices, which must be asked for before jax starts: a process of its own."""
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", JAX, json.dumps(sys.path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    distances = [float(line) for line in ran.stdout.split()]
    assert len(distances) == 2 and np.all(np.array(distances) <= CLOSE)


TORCH = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
import torch
torch.set_num_threads(1)
from placed_cases import case
from ltx2rt.backend import get_backend
from ltx2rt.graph.interpret import interpret
from ltx2rt.placement.profiles import PROFILES, placed
from ltx2rt.testing import ArraySource, relative_l2
mesh = {"tensor": 2, "sequence": 2}
backend = get_backend("cuda", "cpu", mesh)
for name in ("guided-2.3", "forward-2.3"):
    one = case(name)
    graph = placed(one.graph, "transformer", PROFILES["hopper"], mesh)
    found = backend.lower(graph)(backend.load([graph], ArraySource(one.params)), one.inputs)
    expected = interpret(one.graph, one.params, one.inputs)
    if backend.is_main:
        print(max(relative_l2(backend.to_host(found[key]), expected[key]) for key in expected))
"""


def test_torch_runs_it_on_process_groups():
    """Four gloo ranks: two mesh axes, each with groups of its own."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TORCH, json.dumps(sys.path)],
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "4",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    distances = [float(line) for line in outputs[0][0].split()]
    assert len(distances) == 2 and np.all(np.array(distances) <= CLOSE)
