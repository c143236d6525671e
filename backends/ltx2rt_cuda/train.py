"""Training of a graph's adapters in PyTorch: autograd through the lowered function, AdamW by
torch.optim. Each rank's loss counts 1 / ranks, and a parameter's gradient is added up over every
mesh axis that does not cut it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from ltx2rt.backend import EMA, MOMENTS, AdamW, index_of
from ltx2rt.graph.ir import Graph, numbered
from ltx2rt.passes.adapters import MARK
from ltx2rt.passes.quantise import differentiable
from ltx2rt_cuda.as_run import as_run
from ltx2rt_cuda.collectives import keeping
from ltx2rt_cuda.lower import RepeatModule
from ltx2rt_cuda.ops import OPS
from ltx2rt_cuda.program import Program, Weights, upload

if TYPE_CHECKING:
    from ltx2rt_cuda.backend import CudaBackend


class Rematerialised(torch.nn.Module):
    """A block that the backward pass recomputes from its inputs. keeps_exchanges: values that came
    from other ranks are kept."""

    def __init__(self, block: torch.nn.Module, keeps_exchanges: bool):
        super().__init__()
        self.block, self.more = block, {"context_fn": keeping} if keeps_exchanges else {}

    def forward(self, *operands: Any) -> Any:
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, **self.more}
        return checkpoint(self.block, *operands, **how)


class Trainer:
    """A `ltx2rt.backend.Trainer`."""

    def __init__(
        self,
        backend: CudaBackend,
        graph: Graph,
        weights: Weights,
        optimiser: AdamW,
        remat: str = "block",
        others: Sequence[Graph] = (),
        deterministic: bool = False,
    ):
        self.graphs = [as_run(one, backend.device_kind, train=True) for one in (graph, *others)]
        for one in self.graphs:
            differentiable(one)
        self.graph = graph = self.graphs[0]
        self.backend, self.weights, self.optimiser = backend, weights, optimiser
        self.deterministic, self.position = deterministic, backend.position.on(graph.mesh)
        self.programs = [self._program(one, remat) for one in self.graphs]
        layouts, params = graph.all_layouts(), graph.all_params()
        trained = ((n, i) for n in params if MARK in n for i in range(params[n][1]))
        self.layouts = {numbered(n, i): (n, layouts[n]) for n, i in trained}
        self.parameters = {name: weights[name].requires_grad_() for name in self.layouts}
        how = {"eps": optimiser.eps, "weight_decay": optimiser.weight_decay}
        self.adam = torch.optim.AdamW(self.parameters.values(), betas=optimiser.betas, **how)
        averaged = self.parameters if optimiser.ema is not None else {}
        self.ema = {name: p.detach().clone() for name, p in averaged.items()}

    def _program(self, graph: Graph, remat: str) -> Program:
        program = Program(graph, self.backend.hardware, False, self.position, Counter())
        if remat != "none":
            for repeat in [m for m in program.module.modules() if isinstance(m, RepeatModule)]:
                block = repeat.block
                assert isinstance(block, torch.nn.Module)
                repeat.block = Rematerialised(block, remat == "exchanges")
        return program

    def accumulate(
        self, inputs: Mapping[str, Any], weights: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        with torch.enable_grad(), self._to_the_bit():
            losses = self._forward(inputs)
            total = sum(loss.mean() * weights[name] for name, loss in losses.items())
            (total / self.position.size).backward()  # pyrefly: ignore[missing-attribute]
        return self._to_host(losses)

    @contextmanager
    def _to_the_bit(self) -> Iterator[None]:
        """Make operations deterministic if requested. cuBLAS needs its workspace fixed first."""
        before = torch.are_deterministic_algorithms_enabled()
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

    @torch.no_grad()
    def losses(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self._to_host(self._forward(inputs))

    def _forward(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        i = index_of(self.graphs, inputs)
        graph, program = self.graphs[i], self.programs[i]
        own = {name: self._own(graph, name, inputs[name]) for name in graph.inputs}
        operands = [upload(graph, name, x, program.device) for name, x in own.items()]
        found = program.module(*operands, *program.arguments(self.weights))
        return dict(zip(graph.outputs, found, strict=True))

    def _to_host(self, losses: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        whole = {n: self._gathered(x.detach(), {0: "data"}) for n, x in losses.items()}
        return {name: self.backend.to_host(x) for name, x in whole.items()}

    def _own(self, graph: Graph, name: str, value: Any) -> Any:
        """The samples of this rank's place on the axis `data`."""
        axes, parts = graph.inputs[name].type.axes, self.position.mesh.get("data", 1)
        if parts == 1 or axes[:1] != ("B",):
            return value
        return np.split(np.asarray(value), parts)[self.position.coordinates["data"]]

    def _gathered(self, x: torch.Tensor, splits: Mapping[int, str]) -> torch.Tensor:
        """`x` whole, of which this rank has a slice along each dimension of `splits`."""
        for dim, axis in splits.items():
            if (parts := self.position.mesh.get(axis, 1)) > 1:
                x = OPS["all_gather"](x, dim=dim, parts=parts, group=self.position.groups[axis])
        return x

    def _summed(self, x: torch.Tensor, axis: str) -> torch.Tensor:
        (found,) = OPS["all_reduce"](x, group=self.position.groups[axis])
        return torch.ops._c10d_functional.wait_tensor(found)

    @torch.no_grad()
    def update(self, rate: float) -> dict[str, float]:
        names, mesh = list(self.parameters), self.position.mesh
        gradients, cuts = {}, {}
        for name, p in self.parameters.items():
            gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad
            cuts[name] = {axis for _, axis, _ in self.layouts[name][1].splits}
        for axis in mesh:  # one exchange for each axis
            if whole := [n for n in names if axis not in cuts[n]]:
                flat = self._summed(torch.cat([gradients[n].flatten() for n in whole]), axis)
                sizes = [gradients[n].numel() for n in whole]
                parts = zip(whole, flat.split(sizes), strict=True)
                gradients |= {n: part.view_as(gradients[n]) for n, part in parts}
        squares = torch.stack([gradients[n].square().sum() for n in names])
        for axis in mesh:
            cut = torch.tensor([axis in cuts[n] for n in names], device=squares.device)
            squares = torch.where(cut, self._summed(squares, axis), squares)
        found: dict[str, float] = {}
        for name, square in zip(names, squares.tolist(), strict=True):
            declared, _ = self.layouts[name]
            found[declared] = found.get(declared, 0.0) + square
        if bool(squares.isfinite().all()):
            factor = (self.optimiser.max_norm / (squares.sum().sqrt() + 1e-6)).clamp(max=1)
            for name, parameter in self.parameters.items():
                parameter.grad = gradients[name] * factor
            self.adam.param_groups[0]["lr"] = rate
            self.adam.step()
            for name, average in self.ema.items():
                average.lerp_(self.parameters[name], 1 - (self.optimiser.ema or 0))
        self.adam.zero_grad()
        return found

    @torch.no_grad()
    def state(self) -> dict[str, dict[str, np.ndarray]]:
        def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
            found = {}
            for name, x in tensors.items():
                splits = {dim: axis for dim, axis, _ in self.layouts[name][1].splits}
                found[name] = self.backend.to_host(self._gathered(x, splits))
            return found

        adam, own = self.adam.state, self.parameters.items()
        kept = {"parameters": {name: p.detach() for name, p in own}}
        for kind in MOMENTS:
            kept[kind] = {n: adam[p][kind] if adam[p] else torch.zeros_like(p) for n, p in own}
        kept |= {EMA: self.ema} if self.ema else {}
        return {kind: whole(tensors) for kind, tensors in kept.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Mapping[str, np.ndarray]], count: int) -> None:
        def own(name: str, array: np.ndarray) -> torch.Tensor:
            for dim, axis, parts in self.layouts[name][1].splits:
                array = np.split(array, parts, dim)[self.position.coordinates[axis]]
            return torch.from_numpy(np.array(array, order="C")).to(self.programs[0].device.torch)

        for name, parameter in self.parameters.items():
            parameter.copy_(own(name, state["parameters"][name]))
            self.adam.state[parameter] = {
                "step": torch.tensor(float(count)),
                **{kind: own(name, state[kind][name]) for kind in MOMENTS},
            }
        for name, average in self.ema.items():
            average.copy_(own(name, state[EMA][name]))
