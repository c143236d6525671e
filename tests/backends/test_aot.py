"""Programs as the TPU compiler leaves them communicate what their placed graphs say."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from ltx2rt.backend import Compiled, get_ahead_compiler
from ltx2rt.commands.graph import component_graph
from ltx2rt.graph import Graph
from ltx2rt.passes.interleave import interleave
from ltx2rt.passes.loop import taken_apart
from ltx2rt.pipelines.one_stage import OneStage
from ltx2rt.placement.cost import by_kind, exchanges, weight_bytes
from ltx2rt.session.options import parse_mesh
from ltx2rt.weights.presets import preset

NO_COMPILER = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
pytestmark = [pytest.mark.slow, NO_COMPILER]
CLIP = {"width": 256, "height": 256, "num_frames": 9}


def planned(graph: Graph) -> tuple[dict[str, int], int]:
    """Executions by kind, under HLO's names, and bytes received, of one run of a placed graph."""
    found = by_kind(exchanges(graph))
    counts = {kind.replace("_", "-"): t.count for kind, t in found.items()}
    return counts, sum(t.received_bytes for t in found.values())


def denoise(name, branches, profile, mesh, num_layers=2) -> Graph:
    """The denoise loop at full width and reduced depth."""
    config = preset(name).config
    config = replace(config, transformer=replace(config.transformer, num_layers=num_layers))
    return component_graph(config, "denoise", OneStage("", **CLIP), branches, profile, mesh)


@pytest.mark.parametrize("name,branches,profile,mesh", [
    ("ltx-2.0", 2, "ironwood-1d", "tensor=8"),
    ("ltx-2.0", 2, "ironwood", "sequence=8"),
    ("ltx-2.0", 2, "trillium", "tensor=2,sequence=4"),
    ("ltx-2.0", 2, "trillium-2d", "fsdp=2,tensor=4"),
    ("ltx-2.3", 4, "trillium", "guidance=2,sequence=2,tensor=2"),
])  # fmt: skip
def test_a_compiled_step_communicates_its_plan(name, branches, profile, mesh):
    mesh = parse_mesh(mesh)
    graph = denoise(name, branches, profile, mesh)
    compile_ = get_ahead_compiler("tpu", "v6e:2x4", mesh)
    whole, halves = taken_apart(graph), taken_apart(interleave(graph))
    parts = ("before", whole.before, halves.before), ("step", whole.body, halves.body)
    for part, placed, apart in parts:
        found = compile_(graph, part)
        (fewest, _) = planned(placed)
        (counts, received) = planned(apart)
        # XLA joins sums of both halves that are ready together.
        sums = {name: found.collectives.pop(name, 0) for name in ("all-reduce",) if name in counts}
        assert all(fewest[name] <= n <= counts.pop(name) for name, n in sums.items()), (part, sums)
        assert found.collectives == counts, part
        # Statistics of a few tokens are padded to a whole tile of the memory's layout before they
        # are sent.
        assert found.received_bytes == pytest.approx(received, rel=1e-2), part
    assert planned(whole.body)[0].keys() >= {"all-reduce" if "tensor" in mesh else "all-to-all"}


def decoder(name: str, **clip: int) -> tuple[Graph, Compiled]:
    mesh, request = {"tensor": 2, "sequence": 4}, OneStage("", **clip)
    how = {"profile": "trillium", "mesh": mesh}
    graph = component_graph(preset(name).config, "video-decoder", request, **how)
    return graph, get_ahead_compiler("tpu", "v6e:2x4", mesh)(graph, "each")


@pytest.mark.parametrize(
    "name,clip", [("tiny-2.3", CLIP), ("ltx-2.0", {"width": 768, "height": 512, "num_frames": 73})]
)
def test_devices_decode_tiles_apart_with_whole_weights(name, clip):
    graph, found = decoder(name, **clip)
    assert found.collectives == {} and found.received_bytes == 0
    latent, frames = graph.inputs["latent"].type.nbytes, graph.outputs["frames"].type.nbytes
    # Whole weights, one tile in, one tile out; memory is padded to tiles of its own, which never
    # doubles frames.
    assert found.weights_bytes >= weight_bytes([graph]) + latent
    assert frames <= found.output_bytes < 2 * frames
