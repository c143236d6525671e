"""One value says how a run is split."""

import pytest

from ltx2rt.passes.loop import step_slots, taken_apart
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from tests.conftest import refused
from tests.placed_cases import case

WHOLE = Placement(PROFILES["hopper"], {"guidance": 2, "sequence": 2, "tensor": 2}, "float8")


def test_a_stage_and_the_text_encoder_keep_all_but_the_mesh():
    assert WHOLE.of(4) == WHOLE
    assert WHOLE.of(1) == Placement(WHOLE.profile, {"sequence": 4, "tensor": 2}, "float8")
    assert WHOLE.text == Placement(WHOLE.profile, {"tensor": 8}, "float8")


def test_float8_is_of_the_transformer_alone():
    def float8(name: str) -> int:
        one = case(name)
        local = Placement(PROFILES["hopper"], {"tensor": 2}, "float8").local(one.graph, one.network)
        return sum(layout.encoding is not None for layout in local.all_layouts().values())

    assert float8("text-2.3") == 0
    with refused("blocks between the first and the last one, and guided-step has 2 blocks"):
        float8("guided-2.3")


@pytest.mark.parametrize(("num_steps", "slots"), [(1, 8), (8, 8), (9, 16)])
def test_a_loop_has_room_for_a_few_more_steps(num_steps, slots):
    assert step_slots(num_steps) == slots
    loop = Placement(PROFILES["single"]).loop(case("guided-2.3").graph, num_steps)
    assert taken_apart(loop).count == slots


def test_only_a_loop_is_looped_and_spread_over_videos():
    graph = case("guided-2.3").graph
    placement = Placement(PROFILES["hopper"], {"data": 2})
    assert placement.local(graph, "transformer").inputs.keys() == graph.inputs.keys()
    found = placement.loop(graph, 3)
    assert found.mesh == {"data": 2} and found.inputs["video_latent"].type.size("videos") == 2
    assert placement.local(graph, "transformer").inputs["video_latent"].type.size("videos") == 1
