"""Where no flag names a mesh, a run takes the one of the least estimated time that fits."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ltx2rt.backend import DeviceInfo
from ltx2rt.errors import InputError
from ltx2rt.instruments.make import standing_for
from ltx2rt.pipelines import pipeline
from ltx2rt.placement.devices import device_kind, device_kinds, known_kind
from ltx2rt.placement.profiles import PROFILES, default_mesh
from ltx2rt.run.estimate import Devices, estimate
from ltx2rt.run.plan import resolved_stages, usual_stages
from ltx2rt.session.arrange import DatasheetBackend, Estimator, arrangements, choose
from ltx2rt.session.open import _chosen, opened_checkpoint, with_mesh
from ltx2rt.session.options import NO_LORA, ModelOptions
from ltx2rt.session.session import Session

OPEN = ExitStack()


@pytest.fixture(scope="module", autouse=True)
def closed():
    with OPEN:
        yield


@cache
def clip(preset="ltx-2.3", name="two-stage", **settings):
    """Options, checkpoint and stages of a request."""
    own = settings.keys() & ModelOptions.__dataclass_fields__.keys()
    options = {key: settings.pop(key) for key in own}
    given = ModelOptions("cuda", Path(), dtype="bfloat16", **options)
    given = OPEN.enter_context(standing_for(preset, given))
    checkpoint = opened_checkpoint(given)
    request = pipeline(name)("a clip", seed=0, **settings)
    return given, checkpoint, resolved_stages(checkpoint, given, request)


def ranked(kind, devices, *words, **settings):
    (options, checkpoint, stages), kind = clip(*words, **settings), device_kind(kind)
    found = replace(options, backend=kind.backend)
    estimator = Estimator(Session(checkpoint, DatasheetBackend(kind, {}), found), kind)
    return arrangements(estimator, devices, stages)


@pytest.mark.parametrize("kind,devices,first", [
    ("v6e", 8, "sequence=8"),
    pytest.param("v7x", 8, "sequence=8", marks=pytest.mark.long),
    pytest.param("h100", 2, None, marks=pytest.mark.long), ("h100", 4, None),
])  # fmt: skip
def test_all_meshes_that_the_network_allows_are_estimated(kind, devices, first):
    found = ranked(kind, devices)
    times = [one.time_s for one in found]
    meshes = [one.mesh for one in found]
    assert all(prod(mesh.values()) == devices for mesh in meshes)
    assert default_mesh(PROFILES[device_kind(kind).profile], devices) in meshes
    assert {"tensor": devices} in meshes
    assert all(a <= b * 1.04 for a, b in pairwise(times))  # the profile's own mesh stays within 3 %
    assert first in (None, str(found[0]))


def test_a_small_model_takes_what_its_heads_allow():
    """Four heads: neither tensor=8 nor, where there is one branch, sequence=8."""
    found = ranked("h100", 4, "tiny-2.3")
    assert len(found) == 6
    assert [str(one) for one in found] == [str(one) for one in ranked("h100", 4, "tiny-2.3")]
    with pytest.raises(InputError, match="heads=4 does not divide over tensor=8"):
        ranked("h100", 8, "tiny-2.3")


def test_the_fastest_that_fits_is_chosen_and_estimated_as_planned(kept):
    """On v6e no device holds the weights whole: with one set at a time two halves fit, with both
    sets eighths."""
    kept(reload=True, offload=True)
    options, checkpoint, stages = clip()
    kind = device_kind("v6e")
    choice = choose(checkpoint, replace(options, backend="tpu"), kind, 8, stages)
    assert choice and choice.best.mesh == {"sequence": 4, "tensor": 2}
    assert choice.runner_up and str(choice.runner_up) in str(choice)
    assert choice.best.time_s < choice.runner_up.time_s
    steps = {c.name: c for c in choice.session.memory.costs(stages)}
    # what leaves the loop is in the estimate, and packed weights are not
    for name, step in choice.best.steps.items():
        assert steps[name].time_s(kind) == pytest.approx(step.time_s(kind), rel=0.03), name


@pytest.mark.parametrize("dtype,mesh,weights_bytes", [
    pytest.param(None, {"sequence": 4, "tensor": 2}, 38.0e9 / 2, marks=pytest.mark.long),
    ("int8", {"sequence": 8}, 19.5e9),
])  # fmt: skip
def test_whole_weights_of_8_bits_fit_a_v6e_and_are_split_by_tokens_alone(
    dtype, mesh, weights_bytes, kept
):
    """Decoded where a product reads them: 18.6 GB a step that no memory moves. bfloat16: halves."""
    kept(offload=True)
    given = {"name": "distilled", "weights_dtype": dtype, "distilled_lora": NO_LORA}
    options, checkpoint, stages = clip(**given)
    kind = device_kind("v6e")
    choice = choose(checkpoint, replace(options, backend="tpu"), kind, 8, stages)
    assert choice and choice.best.mesh == mesh
    step = choice.best.steps["stage1"]
    assert step.read_bytes == pytest.approx(weights_bytes, rel=0.03)
    costs = {cost.name: cost for cost in choice.session.memory.costs(stages)}
    assert costs["stage1"].time_s(kind) == pytest.approx(step.time_s(kind), rel=0.05)


@pytest.mark.long
def test_a_mesh_on_which_sets_are_loaded_anew_pays_for_it():
    """Whole weights of 8 bits are the fastest to step with, but a v6e has room for one set of two,
    and a slow link to the host makes loading them dearer than steps with a cut one."""
    options, checkpoint, stages = clip(weights_dtype="int8")
    kind = replace(device_kind("v6e"), host_bytes_per_s=4e9)
    choice = choose(checkpoint, replace(options, backend="tpu"), kind, 8, stages)
    assert choice and choice.roomier and "tensor" not in choice.roomier.mesh
    assert "has no room for all weights" in str(choice)
    encoder_s = 8e9 / kind.host_bytes_per_s  # only the text encoder's share is loaded
    assert choice.session.memory.reload_s(stages, kind) < encoder_s
    backend = DatasheetBackend(kind, choice.roomier.mesh)
    whole = Session(checkpoint, backend, replace(options, backend="tpu"))
    assert whole.memory.fit(stages, whole.backend.device().room_bytes())
    reload_s = whole.memory.reload_s(stages, kind)
    assert 2 * 20e9 / kind.host_bytes_per_s < reload_s < 2 * 30e9 / kind.host_bytes_per_s
    assert choice.best.time_s + 0.5 < choice.roomier.time_s + reload_s


@pytest.mark.long
def test_the_shortest_request_is_chosen_not_the_fastest_steps():
    """On v6e the mesh of the fastest steps that fit frees the transformer for the diffusion decoder
    and loads it again in every request. The steps count at the rates that `plan` has."""
    given = {"name": "distilled", "video_decoder": "diffusion", "distilled_lora": NO_LORA}
    size = {"width": 1920, "height": 1088, "num_frames": 121}
    options = replace(clip("ltx-2.5", **given)[0], backend="tpu")
    request = pipeline("distilled")("a clip", seed=0, **size)
    found = {
        tensor: estimate(replace(options, mesh=mesh), request, Devices("v6e-8"))
        for tensor, mesh in ((n, {"sequence": 8 // n, "tensor": n}) for n in (2, 4))
    }
    assert found[2].session.memory.mode == "reload" and found[4].time_s < found[2].time_s
    chosen = estimate(options, request, Devices("v6e-8"))
    assert chosen.session.backend.mesh == {"sequence": 2, "tensor": 4}
    assert chosen.time_s == found[4].time_s


def test_flags_win():
    def chooses(count=2, **given):
        options, request = clip("tiny-2.3")[0], pipeline("two-stage")("a clip", seed=0)
        found = estimate(replace(options, **given), request, Devices("h100", count))
        return found.notes[0].startswith("mesh ")

    assert chooses() and not chooses(1)
    assert not chooses(mesh={"tensor": 2}) and not chooses(profile="hopper")


def test_a_session_that_is_told_of_no_run_takes_a_clip_of_default_size():
    options, checkpoint, stages = clip("tiny-2.3")
    assert [s.name for s in usual_stages(checkpoint, options)] == [s.name for s in stages]


def test_a_launch_chooses_where_its_cards_are_known():
    options, checkpoint, stages = clip("tiny-2.3")
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}

    def choice(card: str, count: int = 2, elsewhere: str | None = "h100-80gb", **given: Any):
        """elsewhere: the kind that the other process has."""
        here = with_mesh(replace(options, **given), launched)
        assert prod(here.mesh.values()) == 2
        device, said = DeviceInfo("cuda", card, int(80e9), int(80e9), count), []

        def agree(flag):
            said.append(flag)
            return flag or [None, *device_kinds()][len(said) - 1] == elsewhere

        backend: Any = SimpleNamespace(device=lambda: device, mesh=here.mesh, agree=agree)
        return _chosen(here, checkpoint, backend, lambda _: stages)

    card = "NVIDIA H100 80GB HBM3"
    assert choice(card) and choice(card, num_gpus=2)
    assert choice(card, mesh={"tensor": 2}) is None and choice(card, mesh={"sequence": 2}) is None
    assert choice("NVIDIA H100 PCIe") is None
    assert choice("A card of tomorrow", elsewhere=None) is None
    assert choice(card, count=1) is None, "cards of another host, behind unknown links"
    assert choice(card, elsewhere="h200-141gb") is None


@pytest.mark.parametrize("kind,name,total,expected", [
    ("cuda", "NVIDIA A100-SXM4-40GB", 42e9, "a100-40gb"), ("cuda", "NVIDIA A100-SXM4-80GB", 85e9, "a100-80gb"),
    ("cuda", "NVIDIA GeForce RTX 4090", 25e9, "rtx4090-24gb"), ("cuda", "NVIDIA H200", 150e9, "h200-141gb"),
    ("cuda", "NVIDIA A100-PCIE-40GB", 42e9, None), ("cuda", "NVIDIA H100 NVL", 100e9, None),
    ("tpu", "TPU v6 lite", 32e9, "v6e"), ("tpu", "TPU7x", 96e9, "v7x"), ("tpu", "TPU v4", 32e9, None),
    ("cpu", "Xeon", 1e12, None),
])  # fmt: skip
def test_a_card_is_known_by_its_drivers_name(kind, name, total, expected):
    found = known_kind(kind, name, int(total))
    assert (found and found.name) == expected


def test_max_memory_leaves_the_room_of_a_card_of_that_size():
    """The reserve is a share of what a run may take, not of the whole card."""
    kinds = map(device_kind, ("h200-141gb", "rtx3060-12gb"))
    large, small = (DatasheetBackend(kind, {}).device() for kind in kinds)
    assert large.room_bytes(12.0) == small.room_bytes() == int(12e9 * 0.98 - 3e9)
    assert large.room_bytes() == int(141e9 * 0.98 - 3e9)
    left = replace(large, free_bytes=10 * 10**9)
    assert left.room_bytes(held_bytes=2 * 10**9) == small.room_bytes()
