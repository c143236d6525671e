"""One network as a `torch.nn.Module`, for somebody's own program: parameters under the checkpoint's
names, inputs under the graph's. Gradients reach every parameter and every floating input.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ltx2rt.backend import TensorSource
from ltx2rt.errors import GraphError
from ltx2rt.graph.ir import Graph
from ltx2rt.passes.quantise import trainable
from ltx2rt.weights.audit import audit
from ltx2rt_cuda.lower import lower
from ltx2rt_cuda.ops.table import DTYPES
from ltx2rt_cuda.program import Program, to_torch


def as_module(
    network: Graph | Program,
    source: TensorSource | None = None,
    device: torch.device | str = "cpu",
    compile: bool = False,
) -> NetworkModule:
    """A module that computes `network`, a graph of one device or a program of it, on `device`.

    Its `state_dict` has the tensors of the checkpoint: their official names and shapes, in the
    graph's dtype. With a source they are read now; without one they are on the meta device until
    `load_state_dict(tensors, assign=True)`. compile: compile the repeated block once. Raises
    InputError if the source does not fit the graph, GraphError if that is placed or quantised.

        checkpoint = open_checkpoint("ltx-2.3")
        graph = transformer.trace(checkpoint.config.transformer, structure, "bfloat16")
        network = as_module(graph, checkpoint.source("transformer"), "cuda").requires_grad_(False)
        linear = network.get_submodule("model.diffusion_model.transformer_blocks.0.attn1.to_q")
        torch.nn.utils.parametrize.register_parametrization(linear, "weight",
        MyLora(linear.weight.shape, rank=16)) velocity = network(video_latent=x,
        **others)["video_velocity"]
    """
    graph = network if isinstance(network, Graph) else network.graph
    if graph.mesh:
        mesh = ", ".join(f"{axis}={size}" for axis, size in graph.mesh.items())
        raise GraphError(
            f"{graph.name}: placed on {mesh}, where a device holds slices of the checkpoint's "
            "tensors; pass the graph before placement"
        )
    trainable(graph)
    if source is not None:
        audit(graph.parameters(), source, getattr(source, "where", graph.name))
    return NetworkModule(graph, source, torch.device(device), compile)


class Holder(torch.nn.Module):
    """A name in the network that holds parameters: nothing calls it, so that no hook would run."""

    def _no_hook(self, *hook: Any, **how: Any) -> NoReturn:
        raise GraphError(
            "as_module: a submodule holds only parameters and is never called, so that this hook "
            "would not run; register a parametrization on its weight, or hook the whole network"
        )

    register_forward_hook = register_forward_pre_hook = _no_hook
    register_full_backward_hook = register_full_backward_pre_hook = _no_hook
    register_backward_hook = forward = _no_hook


class NetworkModule(torch.nn.Module):
    """See `as_module`."""

    def __init__(
        self, graph: Graph, source: TensorSource | None, device: torch.device, compile: bool
    ):
        super().__init__()
        self.graph = graph
        self.lowered = lower(graph, device, compile)
        homes: dict[str, tuple[torch.nn.Module, str]] = {}
        for name, spec in graph.parameters().items():
            path, _, leaf = name.rpartition(".")
            home = self._submodule(path)
            if source is None:
                tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
            else:
                # copy: the source's memory is a file map.
                tensor = to_torch(source.read(name)).to(device, DTYPES[spec.dtype], copy=True)
            home.register_parameter(leaf, torch.nn.Parameter(tensor))
            homes[name] = (home, leaf)
        layouts = graph.all_layouts()
        self._weights = [  # an operand of `lowered` each: its layers' tensors, each in its parts
            (
                "*" in declared,
                [[homes[part] for part in layouts[declared].names(i)] for i in range(count)],
            )
            for declared, (_, count) in graph.all_params().items()
        ]

    def _submodule(self, path: str) -> torch.nn.Module:
        module: torch.nn.Module = self
        for name in path.split(".") if path else ():
            if name not in module._modules:
                module.add_module(name, Holder())
            module = module.get_submodule(name)
        return module

    def forward(self, **inputs: Any) -> dict[str, torch.Tensor]:
        """Outputs by name from one tensor (or numpy array) for each of `graph.inputs`. Raises
        ValueError for inputs that are missing, unknown or of another shape."""
        self.graph.check_names(inputs)
        weights = [
            [_joined(parts) for parts in layers] if per_layer else _joined(layers[0])
            for per_layer, layers in self._weights
        ]
        device = next(self.parameters()).device
        tensors = []
        for name in self.graph.inputs:
            tensor = torch.as_tensor(inputs[name])
            type = self.graph.input_type(name, tensor.shape)
            tensors.append(tensor.to(device, DTYPES[type.dtype]))
        return dict(zip(self.graph.outputs, self.lowered(*tensors, *weights), strict=True))


def _joined(parts: list[tuple[torch.nn.Module, str]]) -> torch.Tensor:
    """Read at every call, so that a parametrization or `functional_call` can replace it."""
    tensors = [getattr(home, leaf) for home, leaf in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
