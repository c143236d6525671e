"""What the recorded steps of a full-size request launch and move on a GPU, and what they must not do, without one."""

import json
from pathlib import Path

import pytest

from benchmarks import launches

RECORDED = json.loads((Path(launches.__file__).parent / "results" / "launches.json").read_text())
FAST = ("", None, "stage1"), ("tensor=4", None, "stage2"), ("", "float8", "stage2")


def case(step):
    name = step["mesh"], step["weights_dtype"], step["stage"]
    return pytest.param(step, id=" ".join(filter(None, name)), marks=() if name in FAST else pytest.mark.slow)


@pytest.mark.parametrize("step", list(map(case, RECORDED["steps"])))
def test_a_recorded_step_launches_and_moves_what_the_table_says(step):
    """Where it is meant to change: python -m benchmarks.launches --output benchmarks/results/launches.json"""
    mesh, dtype, stage = step["mesh"], step["weights_dtype"], step["stage"]
    graphs = launches.step_graphs(RECORDED["preset"], tuple(RECORDED["clip"]), mesh, dtype, (stage,))
    assert launches.count(graphs[stage]).facts() == {key: step[key] for key in ("launches", "gb", "by")}
