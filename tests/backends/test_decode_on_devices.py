"""The decoder on several devices: each decodes its own, with whole weights, and nothing
communicates."""

import json
from pathlib import Path

import pytest

from tests.virtual import on_devices


@pytest.fixture(scope="module")
def facts():
    # a program from the disk does not say what it consists of
    uncached = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    script = Path(__file__).with_name("decode_on_devices.py")
    return json.loads(on_devices(4, script, **uncached))


@pytest.mark.parametrize("count", ["1", "3", "4"])
def test_a_batch_equals_each_on_one_device(facts, count):
    assert facts["distances"][count] <= 1e-6  # the same program on the same kind of device


def test_a_reader_that_stops_leaves_one_batch_under_way(facts):
    assert facts["taken"] == 2 * 4


def test_every_number_of_videos_is_one_program(facts):
    assert facts["compilations"] == 1 and facts["compiled_by_calls"] == 0, "it was compiled ahead"


def test_weights_stay_whole_on_every_device_and_nothing_communicates(facts):
    assert facts["replicated"] and all(facts["replicated"])
    assert facts["collectives"] == []


def test_a_device_needs_no_more_room_than_alone(facts):
    # XLA lays out temporaries anew for the partitioned program: a few per cent either way.
    assert 0 < facts["temporaries"] <= 1.1 * facts["temporaries_alone"]
