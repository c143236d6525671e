"""JAX: a text encoder with layers that come from the host one by one is the resident one."""

import json
import sys
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from ltx2rt_tpu.weights import FileLayers, HostLayers

from ltx2rt.backend import get_backend
from ltx2rt.graph.ir import Graph
from ltx2rt.passes.place import place
from ltx2rt.placement import stream
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.stages.text import Text
from ltx2rt.weights.presets import preset
from tests.conftest import assert_near, assert_same
from tests.parity import ArraySource, random_params
from tests.virtual import on_devices

HERE = Path(__file__)
TENSOR = {"tensor": 2}


def encoder(name: str, mesh: dict[str, int] | None = None) -> Graph:
    """The text encoder of a tiny model, of one device of the mesh."""
    model = preset(name).config
    row, sizes = call_of(model)
    graph = row.trace(model, sizes, "float32")
    return place(graph, PROFILES["cpu"].rules["text-encoder"], mesh) if mesh else graph


def call_of(model):
    (call,) = Text(("a prompt", "another")).needs(model)
    return call.row, call.sizes


def feeds(graph: Graph) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(0), {}
    for name, v in graph.inputs.items():
        drawn = rng.standard_normal(v.type.shape, np.float32)
        whole = rng.integers(1, 20, v.type.shape, np.int32)
        found[name] = whole if v.type.dtype == "int32" else drawn
    return found


def params_of(graph: Graph) -> dict[str, np.ndarray]:
    """Gemma 4 scales each layer by a number of its own: near 1 it enlarges no rounding."""
    params = random_params(graph)
    return {n: x * 0 + 1 if n.endswith("layer_scalar") else x for n, x in params.items()}


def ways(graph: Graph, mesh: dict[str, int] | None = None) -> list[dict[str, np.ndarray]]:
    """All layers on the device, all on the host, and all in the file, after they were parked."""
    backend, source = get_backend("tpu", "cpu", mesh or {}), ArraySource(params_of(graph))
    from_host, found = {"streamed": frozenset(stream.pieces(graph))}, []
    from_file = from_host | {"road": "file"}
    for kind, how in ((None, {}), (HostLayers, from_host), (FileLayers, from_file)):
        weights = backend.load([graph], source, **how)
        streamed = [x for x in weights.values() if isinstance(x, (HostLayers, FileLayers))]
        assert all(isinstance(x, kind) for x in streamed) and bool(streamed) == bool(how)
        weights = backend.unpark(backend.park(weights), {})
        made = backend.lower(graph)(weights, feeds(graph))
        found.append({name: backend.to_host(x) for name, x in made.items()})
    return found


def check(graph: Graph, mesh: dict[str, int] | None = None) -> None:
    resident, *others = ways(graph, mesh)
    for other in others:
        assert_same(other, resident)


@pytest.fixture
def small_matrices_move(monkeypatch):
    monkeypatch.setattr(stream, "LEAST_BYTES", 8192)


@pytest.mark.parametrize("name", ["tiny-2.3", pytest.param("tiny-2.0", marks=pytest.mark.slow)])
def test_layers_from_the_host_or_the_file_change_no_bit(name, small_matrices_move):
    check(encoder(name))


@pytest.mark.long
def test_gemma_4_differs_by_less_than_other_fusions_of_its_layers(small_matrices_move):
    """Layers in a loop and programs of one layer are fused alike but for a few last bits."""
    resident, layered, _ = ways(encoder("tiny-2.5"))
    assert_near(layered, resident, 1e-5)


@pytest.mark.parametrize("name, first", [
    ("tiny-2.3", [0, 1, 2, 3]),
    pytest.param("tiny-2.5", [0, 0, 0, 1, 1, 1], marks=pytest.mark.long),
])  # fmt: skip
def test_no_more_than_two_layers_are_brought_at_once(small_matrices_move, monkeypatch, name, first):
    """The bytes are those of the plan; a layer is begun when the one before the last is done.
    Three layers of a tiny Gemma 4, six of a full one, are one body of its repeat."""
    graph, brought, seen = encoder(name), [], []
    real, wait = HostLayers.brought, jax.block_until_ready

    def bring(self, layer):
        brought.append(self.layers[layer].nbytes)
        seen.append(("layer", layer))
        return real(self, layer)

    def block(x):
        seen.append(("wait", None))
        return wait(x)

    backend = get_backend("tpu", "cpu")
    sizes = stream.pieces(graph)
    weights = backend.load([graph], ArraySource(params_of(graph)), streamed=frozenset(sizes))
    monkeypatch.setattr(HostLayers, "brought", bring)
    monkeypatch.setattr("jax.block_until_ready", block)
    backend.lower(graph)(weights, feeds(graph))
    assert sum(brought) == sum(sizes.values())
    order = [seen[i] for i in range(len(seen)) if i == 0 or seen[i] != seen[i - 1]]
    layers = [layer for kind, layer in order if kind == "layer"]
    # Layer 0 of a stack, a wait for what is before it, layer 1, a wait for layer 0, layer 2 ...
    assert layers[: len(first)] == first and len(layers) == len(sizes)
    assert all(a != b for (a, _), (b, _) in pairwise(order) if a == "layer")


@pytest.mark.long
def test_two_devices_bring_their_own_slices():
    on_devices(2, HERE)


def full_size(topology: str, name: str) -> list[float]:
    """GB of each program of a text encoder on one chip: arguments, results, temporaries."""
    from ltx2rt_tpu.aot import AheadCompiler
    from ltx2rt_tpu.program import abstract, ops_for
    from ltx2rt_tpu.stream import Layered
    from ltx2rt_tpu.weights import abstract_weights

    where = jax.sharding.SingleDeviceSharding(AheadCompiler(topology, {}).devices[0])
    config = preset(name).config
    row, sizes = call_of(config)
    graph = row.trace(config, sizes, "bfloat16")
    hosted = frozenset(n for n, (v, _) in graph.all_params().items() if stream.moves(n, v.type))
    found = {}

    class Measured(Layered):
        def call(self, program, *operands):
            if operands and program not in (*found, self.spread, self.whole):
                memory = program.lower(*operands).compile().memory_analysis()
                parts = ("argument", "output", "temp")
                size = sum(getattr(memory, f"{part}_size_in_bytes") for part in parts)
                found[program] = (size - memory.alias_size_in_bytes) / 1e9
            made = program.eval_shape(*operands)
            return jax.tree.map(lambda x: on_chip(x.shape, x.dtype), made)

    on_chip = partial(jax.ShapeDtypeStruct, sharding=where)
    weights = abstract_weights(graph, where)
    for n in hosted:
        layer = on_chip((1, *weights[n].shape[1:]), weights[n].dtype)
        weights[n] = SimpleNamespace(brought=lambda _, layer=layer: layer)
    Measured(graph, where, hosted, ops_for(where))(weights, abstract(graph.inputs, where))
    return list(found.values())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("topology, name, count", [
    ("v6e:2x4", "ltx-2.3", 7), ("v5e:2x4", "ltx-2.3", 7), ("v6e:2x4", "ltx-2.5", 12),
])  # fmt: skip
def test_layers_of_full_size_fit_one_chip(topology, name, count):
    env = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    programs = json.loads(on_devices(1, HERE, topology, name, **env).splitlines()[-1])
    # The largest reads 49 states of Gemma and the projections of them; a v5e has 16 GB.
    assert len(programs) == count and max(programs) < 8


if len(sys.argv) > 2 and __name__ == "__main__":
    print(json.dumps(full_size(*sys.argv[1:])))
elif __name__ == "__main__":
    stream.LEAST_BYTES = 8192
    check(encoder("tiny-2.3", TENSOR), TENSOR)
