"""Tokens and guidance branches split between devices give the values of one, with the communication
promised."""

import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from ltx2rt.backend import get_backend
from ltx2rt.models import guided_step, transformer
from ltx2rt.placement.cost import by_kind, exchanges
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.weights.presets import preset
from tests.conftest import refused
from tests.parity import ArraySource, relative_l2
from tests.placed_cases import MASKED, Case, attention_weights, case
from tests.virtual import forked, on_devices

CLOSE = 1e-5  # float32: another order of summation
MESHES = (
    {"sequence": 2}, {"sequence": 3}, {"sequence": 4}, {"tensor": 2, "sequence": 3},
    {"sequence": 2, "tensor": 2}, {"guidance": 2}, {"guidance": 2, "tensor": 3},
    {"guidance": 2, "sequence": 3, "tensor": 2},
)  # fmt: skip
STAGE_2 = 6144, 126, 1024, (16, 16, 24, 16, 126, 126)  # tokens of video, sound and text; positions
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")


def on(mesh, graph, audio="replicated"):
    return Placement(replace(PROFILES["trillium"], audio=audio), mesh).local(graph, "transformer")


def executed(graph):
    found = Counter()
    for node, times in graph.walk():
        found[node.op] += times
    return Counter({op: found[op] for op in COLLECTIVES})


def agree(one, mesh, audio="replicated"):
    local = on(mesh, one.graph, audio)
    assert local.mesh == mesh
    one.agrees(local, CLOSE)


def seldom(mesh: dict[str, int], *name: str):
    """A case that is long, but on three devices and on all axes at once."""
    marks = () if mesh in (MESHES[1], MESHES[-1]) else pytest.mark.long
    return pytest.param(*name, mesh, marks=marks)


OTHERS = product(["guided-2.0", "forward-2.3", MASKED], MESHES)
CASES = [*product(["guided-2.3"], MESHES), *(seldom(mesh, name) for name, mesh in OTHERS)]


@pytest.mark.parametrize("name, mesh", CASES, ids=str)
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
    structure = guided_step.StepShape(guided_step.Branches(), *STAGE_2)
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
    shape = transformer.ForwardShape(2, tokens, 7, 5, counts, *levels, masked=True)
    feeds["video_attention_mask"] = rng.random((2, tokens, tokens), np.float32)
    return Case.drawn(transformer.trace(config, shape, "float32"), feeds)


@pytest.mark.parametrize("mesh", [seldom(mesh) for mesh in MESHES], ids=str)
def test_a_mask_between_tokens_that_do_not_divide(mesh):
    agree(uneven_masked(), mesh)


@cache
def uneven_step(masked: bool) -> Case:
    rng = np.random.default_rng(5)
    config, tokens, feeds = uneven(rng)
    feeds |= guided_step.mask_feeds("video", np.linspace(0, 1, tokens).round(1))
    feeds |= guided_step.mask_feeds("audio", np.ones(7))
    feeds |= {"sigmas": np.array([0.8, 0.6]), "video_attention_mask": attention_weights(tokens)}
    feeds["guidance"] = np.array([[3, 1, 3, 0.7], [7, 1, 3, 0.7]])
    branches, counts = guided_step.Branches(True, True, True), transformer.coordinate_counts(feeds)
    sizes = branches, tokens, 7, 5, counts, len(feeds["video_levels"])
    structure = guided_step.StepShape(*sizes, masked=masked, stg_blocks=(1,))
    return Case.drawn(guided_step.trace(config, structure, "float32"), feeds)


@pytest.mark.parametrize("sound, masked", [
    pytest.param("replicated", False, marks=pytest.mark.long),
    ("split", False),
    pytest.param("replicated", True, marks=pytest.mark.long),  # masks alone: the test above
])  # fmt: skip
@pytest.mark.parametrize("mesh", [seldom(mesh) for mesh in MESHES], ids=str)
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
    structure = guided_step.StepShape(guided_step.Branches(True), *STAGE_2)
    graph = on(mesh, guided_step.trace(config, structure, "bfloat16"))
    found = executed(graph)
    reduces = 7 * 48 if "tensor" in mesh else 0
    assert found == Counter(all_to_all=2 * 48, all_gather=48 + 1, all_reduce=reduces)
    assert sum(found.values()) <= most
    assert (
        0.8 * most_bytes
        < sum(t.received_bytes for t in by_kind(exchanges(graph)).values())
        <= most_bytes
    )


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
    body = local.repeats[0].body
    sizes = {v.type.size("B") for v in body.inputs.values() if "B" in v.type.axes}
    assert sizes == {4 // mesh["guidance"]}


@pytest.mark.parametrize("mesh", ({"guidance": 3}, {"guidance": 8}), ids=str)
def test_branches_that_do_not_divide_are_refused(mesh):
    parts = mesh["guidance"]
    with refused(f"4 branches do not divide over guidance={parts}; choose a divisor of 4"):
        on(mesh, case("guided-2.3").graph)


def test_branches_of_the_text_encoder_stay_together():
    """Its batch is the prompts, which the axis `guidance` does not split."""
    one = case("text-2.3")
    assert not one.placed({"guidance": 2}, "trillium").mesh
    local = one.placed({"guidance": 2, "tensor": 2}, "trillium")
    assert local.mesh == {"guidance": 2, "tensor": 2}
    attrs = (node.attrs for node, _ in local.walk())
    assert {each["mesh_axis"] for each in attrs if "mesh_axis" in each} == {"tensor"}


def test_heads_that_do_not_divide_are_refused():
    with refused("--mesh: sequence=5 does not divide the 12 heads"):
        on({"sequence": 5}, case("guided-2.3").graph)


@pytest.mark.slow
@pytest.mark.parametrize("kind, devices", [("jax", 6), ("torch", 1)])
def test_devices_of_several_axes_run_it(kind, devices):
    """In a process of its own: JAX is asked for devices before it starts, ranks are forked.

    On JAX the second mesh, as of a stage with one branch, runs on the weights of the first without a
    copy; the third cuts weights both ways.
    """
    distances = [float(line) for line in on_devices(devices, __file__, kind).split()]
    assert len(distances) == 3 and max(distances) <= CLOSE


def report(backend, one, found) -> None:
    print(max(relative_l2(backend.to_host(found[key]), x) for key, x in one.expected.items()))


def check_jax() -> None:
    from ltx2rt_tpu.weights import weights_on

    one = case(MASKED)
    backend = get_backend("tpu", "cpu", {"guidance": 2, "tensor": 3})
    meshes = (backend.mesh, {"sequence": 2, "tensor": 3}), ({"fsdp": 2, "tensor": 3},)
    for graphs in ([one.placed(mesh, "trillium") for mesh in some] for some in meshes):
        weights = backend.load(graphs[:1], ArraySource(one.params))
        for graph in graphs:
            program = backend.lower(graph)
            report(backend, one, program(weights, one.inputs))
            for name, array in weights_on(program.place, graph, weights).items():
                value, count = graph.all_params()[name]
                here, there = (x.addressable_shards for x in (array, weights[name]))
                assert here[0].data.nbytes == value.type.nbytes * count, name
                for a, b in zip(here, there, strict=True):
                    assert a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer(), name


def check_rank(rank: int) -> None:
    """Two mesh axes with their groups, and a second mesh."""
    backend = get_backend("cuda", "cpu", {"guidance": 2, "tensor": 2})
    meshes = (backend.mesh, {"sequence": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2})
    for name, mesh in zip(("masked-2.3", "forward-2.3", "guided-2.0"), meshes, strict=True):
        one = case(name)
        graph = one.placed(mesh)
        found = backend.lower(graph)(backend.load([graph], ArraySource(one.params)), one.inputs)
        if backend.is_main:
            report(backend, one, found)


if __name__ == "__main__":
    check_jax() if sys.argv[1] == "jax" else forked(4, check_rank)
