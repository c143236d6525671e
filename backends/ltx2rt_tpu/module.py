"""One network as a flax `nnx.Module`, for somebody's own program: the names of its parameters, and
how each states its sharding. Gradients reach every parameter and every floating input.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

from ltx2rt.backend import TensorSource
from ltx2rt.graph.ir import Graph
from ltx2rt.passes.quantise import trainable
from ltx2rt.weights.audit import audit
from ltx2rt_tpu.backend import TpuBackend
from ltx2rt_tpu.program import Program
from ltx2rt_tpu.weights import abstract_weights, weight_specs


def as_nnx(
    network: Graph | Program, source: TensorSource | None = None, device: str = "auto"
) -> NetworkModule:
    """A module that computes `network`: a graph on `device` ("auto", "tpu" or "cpu"), or a program
    of it where it is.

    Its parameters are `module.weights`, by the graph's names: the checkpoint's, with `*` for the
    layer; layers are stacked along a first axis (joined by " | " where a pass packed several into
    one). On a mesh each is a global array, cut by its `out_sharding`, which
    `nnx.get_partition_spec` reads. With a source they are read now; without one they are
    `jax.ShapeDtypeStruct`s until `nnx.update(module.weights, arrays)`. Raises InputError if the
    source does not fit the graph or the mesh the devices, GraphError if the graph is quantised.

        checkpoint = open_checkpoint("ltx-2.3")
        graph = transformer.trace(checkpoint.config.transformer, structure, "bfloat16")
        graph = place(graph, {"heads": "tensor", "ff": "tensor"}, {"tensor": 8})
        network = as_nnx(graph, checkpoint.source("transformer"))
        trained = nnx.All(nnx.Param, lambda path, _: "to_q" in path[-1])
        loss = lambda module: ((module(video_latent=x, **others)["video_velocity"] - target) **
        2).mean() gradients = nnx.grad(loss, argnums=nnx.DiffState(0, trained))(network)
    """
    graph = network if isinstance(network, Graph) else network.graph
    trainable(graph)
    if source is not None:
        audit(graph.parameters(), source, getattr(source, "where", graph.name))
    if isinstance(network, Program):
        device = next(iter(network.place.device_set)).platform
    backend = TpuBackend(device, graph.mesh)
    place = backend.place_of(graph)
    program = network if isinstance(network, Program) else Program(graph, place, unrolled=False)
    weights = abstract_weights(graph, place) if source is None else backend.load([graph], source)
    return NetworkModule(program, weights)


class NetworkModule(nnx.Module):
    """See `as_nnx`. weights: by name, an `nnx.Param` each."""

    def __init__(self, program: Program, weights: dict[str, Any]):
        self.program = program
        metadata: dict[str, dict[str, Any]] = {name: {} for name in weights}
        if isinstance(program.place, NamedSharding):
            mesh, specs = program.place.mesh, weight_specs(program.graph)
            # The arrays are already sharded, and a parameter without a value cannot be moved.
            how = {"mesh": mesh, "eager_sharding": False}
            metadata = {name: {"out_sharding": specs[name], **how} for name in weights}
        params = {name: nnx.Param(value, **metadata[name]) for name, value in weights.items()}
        self.weights = nnx.Dict(params)

    def __call__(self, **inputs: Any) -> dict[str, Array]:
        """Outputs by name from one array for each of `program.graph.inputs`. Raises ValueError for
        inputs that are missing, unknown or of another shape."""
        graph = self.program.graph
        graph.check_names(inputs)
        arrays = {n: jnp.asarray(inputs[n], v.type.dtype) for n, v in graph.inputs.items()}
        for name, array in arrays.items():
            graph.input_type(name, array.shape)
        weights = {name: self.weights[name].get_value() for name in self.weights}
        return self.program.nested(weights, arrays)
