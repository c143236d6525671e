"""The graphs of the tiny models are those of the golden file: a change of structure moves none of
their nodes."""

import json

from tests.unchanged import GOLDEN, graph_hashes


def test_graphs_of_every_network_are_the_golden_ones():
    """A wanted change of a graph is recorded anew by `python -m tests.unchanged golden`."""
    golden = json.loads(GOLDEN.read_text())
    found = graph_hashes(("tiny-2.0", "tiny-2.3", "tiny-2.5"))
    assert found.keys() == golden.keys()
    assert [name for name in golden if found[name] != golden[name]] == []
