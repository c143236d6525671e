"""The decoder on several devices: each decodes its own, with whole weights, and nothing
communicates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from virtual import xla_flags


@pytest.fixture(scope="module")
def facts():
    env = os.environ | {"XLA_FLAGS": xla_flags(4), "JAX_PLATFORMS": "cpu"}
    env["JAX_ENABLE_COMPILATION_CACHE"] = (
        "false"  # what comes from the disk does not say what it consists of
    )
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    script = Path(__file__).with_name("decode_on_devices.py")
    ran = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


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
