"""The graphs of the tiny models are those of the golden file: a change of structure moves none of
their nodes."""

import json

import pytest

from tests.unchanged import GOLDEN, PRESETS, graph_hashes


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(preset, marks=[] if preset == "tiny-2.3" else pytest.mark.long)
        for preset in PRESETS
    ],
)
def test_graphs_of_every_network_are_the_golden_ones(preset):
    """A wanted change of a graph is recorded anew by `python -m tests.unchanged golden`."""
    golden = {
        name: digest
        for name, digest in json.loads(GOLDEN.read_text()).items()
        if preset in name.split()
    }
    found = graph_hashes((preset,))
    assert found.keys() == golden.keys()
    assert [name for name in golden if found[name] != golden[name]] == []


def test_every_golden_graph_is_of_a_preset_that_is_compared():
    assert all(set(name.split()) & set(PRESETS) for name in json.loads(GOLDEN.read_text()))
