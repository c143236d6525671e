"""Training of a graph's adapters in JAX: the gradient of the function that is lowered anyway, AdamW
by optax. Each device's loss counts 1 / devices, and a parameter's gradient is added up over every
mesh axis that does not cut it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, ShapeDtypeStruct, lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from ltx2rt.backend import EMA, MOMENTS, AdamW, index_of
from ltx2rt.graph.interpret import NUMPY_DTYPES
from ltx2rt.graph.ir import Graph, numbered
from ltx2rt.passes.adapters import MARK
from ltx2rt.passes.quantise import differentiable
from ltx2rt_tpu.as_run import as_run
from ltx2rt_tpu.lower import run
from ltx2rt_tpu.program import compiler_options, device_kind, on_mesh, ops_for
from ltx2rt_tpu.weights import Weights, abstract_weights, weight_specs

if TYPE_CHECKING:
    from ltx2rt_tpu.backend import TpuBackend


class Gradients:
    """Losses and gradients of a batch, jitted: (parameters, frozen, inputs, loss weights)."""

    def __init__(self, graph: Graph, place: Sharding, remat: str):
        differentiable(graph)
        self.graph = as_run(graph, device_kind(place), train=True)
        self.place, self.remat, self.ops = place, remat, ops_for(place)
        options = compiler_options(graph, place)
        self.function: Any = jax.jit(self._global, compiler_options=options)
        self.losses: Any = jax.jit(self._global_losses, compiler_options=options)

    @property
    def mesh(self) -> Mapping[str, int]:
        return self.place.mesh.shape if isinstance(self.place, NamedSharding) else {}

    def lowered(self) -> Lowered:
        """For arguments that are not there."""
        frozen = abstract_weights(self.graph, self.place)
        trained = {name: frozen.pop(name) for name in list(frozen) if MARK in name}
        number = ShapeDtypeStruct((), jnp.float32, sharding=self.place)
        inputs = {}
        for name, v in self.graph.inputs.items():
            first, *others = v.type.shape  # sizes on one device
            samples = first * self.mesh["data"] if self._spec(name) else first
            shape, sharding = (samples, *others), self.sharding(name)
            inputs[name] = ShapeDtypeStruct(shape, v.type.dtype, sharding=sharding)
        losses = dict.fromkeys(self.graph.outputs, number)
        return self.function.lower(trained, frozen, inputs, losses)

    def sharding(self, name: str) -> Sharding:
        if not isinstance(self.place, NamedSharding):
            return self.place
        return NamedSharding(self.place.mesh, self._spec(name))

    def _spec(self, name: str) -> P:
        """Sharding of an input: samples over `data`."""
        lead = self.graph.inputs[name].type.axes[:1] == ("B",) and self.mesh.get("data", 1) > 1
        return P("data") if lead else P()

    def _global(
        self, parameters: Weights, frozen: Weights, inputs: Any, weights: Any
    ) -> tuple[Any, Weights]:
        ours, others, fed, losses = self._specs(parameters, frozen, inputs)
        local = on_mesh(self._local, self.place, ours, others, fed, P(), out=(losses, ours))
        return local(parameters, frozen, inputs, weights)

    def _specs(self, parameters: Weights, frozen: Weights, inputs: Any) -> tuple[Any, ...]:
        """Shardings of all three, and of the losses."""
        specs, losses = weight_specs(self.graph), P("data") if "data" in self.mesh else P()
        ours, others = ({name: specs[name] for name in part} for part in (parameters, frozen))
        return ours, others, {n: self._spec(n) for n in inputs}, losses

    def _global_losses(self, weights: Weights, inputs: Any) -> Any:
        ours, _, fed, losses = self._specs(weights, {}, inputs)
        return on_mesh(self._losses, self.place, ours, fed, out=losses)(weights, inputs)

    def _losses(self, weights: Weights, inputs: Any, remat: str = "none") -> dict[str, Array]:
        ordered = [inputs[name] for name in self.graph.inputs]
        found = run(self.graph, weights, ordered, ops=self.ops, remat=remat)
        return dict(zip(self.graph.outputs, found, strict=True))

    def _local(
        self, parameters: Weights, frozen: Weights, inputs: Any, weights: Any
    ) -> tuple[Any, Weights]:
        size = self.place.mesh.size if isinstance(self.place, NamedSharding) else 1

        def total(parameters: Weights) -> tuple[Array, dict[str, Array]]:
            losses = self._losses(frozen | parameters, inputs, self.remat)
            weighted = [weights[name] * loss.mean() for name, loss in losses.items()]
            return jnp.stack(weighted).sum() / size, losses

        gradients, losses = jax.grad(total, has_aux=True)(parameters)
        layouts = self.graph.all_layouts()
        for name, gradient in gradients.items():
            cut = {axis for _, axis, _ in layouts[name].splits}
            if whole := tuple(axis for axis in self.mesh if axis not in cut):
                gradients[name] = lax.psum(gradient, whole)
        return losses, gradients


class Trainer:
    """A `ltx2rt.backend.Trainer`. Parameters of all blocks are one array, the block first."""

    def __init__(
        self,
        backend: TpuBackend,
        graph: Graph,
        weights: Weights,
        optimiser: AdamW,
        remat: str = "block",
        others: Sequence[Graph] = (),
    ):
        self.graph, self.graphs = graph, [graph, *others]
        self.batches = [Gradients(one, backend.place_of(one), remat) for one in self.graphs]
        self.parameters = {name: x for name, x in weights.items() if MARK in name}
        self.frozen = {name: weights[name] for name in graph.all_params() if MARK not in name}
        self.counts = {n: count for n, (_, count) in graph.all_params().items() if MARK in n}
        self.optimiser = optimiser
        self.adam = optax.chain(
            optax.scale_by_adam(*optimiser.betas, eps=optimiser.eps),
            optax.add_decayed_weights(optimiser.weight_decay),
        )
        self.moments: Any = jax.jit(self.adam.init)(self.parameters)
        averaged = self.parameters if optimiser.ema is not None else {}
        self.ema = {name: jnp.copy(x) for name, x in averaged.items()}
        self.gradients: Weights | None = None
        self._add: Any = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._step: Any = jax.jit(self._updated, donate_argnums=(0, 1, 2))

    def accumulate(
        self, inputs: Mapping[str, Any], weights: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        scales = {name: np.float32(weight) for name, weight in weights.items()}
        batch = self.batches[index_of(self.graphs, inputs)]
        fed, before = self._fed(batch, inputs), self.gradients
        losses, gradients = batch.function(self.parameters, self.frozen, fed, scales)
        self.gradients = gradients if before is None else self._add(before, gradients)
        return {name: _whole(loss) for name, loss in losses.items()}

    def losses(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        batch = self.batches[index_of(self.graphs, inputs)]
        found = batch.losses(self.frozen | self.parameters, self._fed(batch, inputs))
        return {name: _whole(loss) for name, loss in found.items()}

    def _fed(self, batch: Gradients, inputs: Mapping[str, Any]) -> dict[str, Array]:
        fed = {}
        for name, v in batch.graph.inputs.items():
            value = np.asarray(inputs[name], NUMPY_DTYPES[v.type.dtype])
            fed[name] = _spread(value, batch.sharding(name))
        return fed

    def _updated(
        self, parameters: Weights, moments: Any, ema: Weights, gradients: Weights, rate: Array
    ) -> Any:
        squares = {name: jnp.sum(jnp.square(x)) for name, x in gradients.items()}
        total = jnp.stack(list(squares.values())).sum()
        factor = jnp.minimum(1, self.optimiser.max_norm / (jnp.sqrt(total) + 1e-6))
        clipped = {name: x * factor for name, x in gradients.items()}
        steps, after = cast(Any, self.adam.update(clipped, moments, parameters))
        moved = {name: x - rate * steps[name] for name, x in parameters.items()}
        decay = self.optimiser.ema or 0
        averages = {name: x + (1 - decay) * (moved[name] - x) for name, x in ema.items()}
        kept, fine = (moved, after, averages), jnp.isfinite(total)
        before = parameters, moments, ema
        chosen = jax.tree.map(lambda new, old: jnp.where(fine, new, old), kept, before)
        return *chosen, squares

    def update(self, rate: float) -> dict[str, float]:
        assert self.gradients is not None, "nothing was accumulated"
        found = self._step(
            self.parameters, self.moments, self.ema, self.gradients, np.float32(rate)
        )
        self.parameters, self.moments, self.ema, squares = found
        self.gradients = None
        return {name: float(x) for name, x in squares.items()}

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        adam = self.moments[0]
        kept = {"parameters": self.parameters} | dict(zip(MOMENTS, (adam.mu, adam.nu), strict=True))
        kept |= {EMA: self.ema} if self.ema else {}
        return {kind: self._blocks(arrays) for kind, arrays in kept.items()}

    def _blocks(self, arrays: Mapping[str, Array]) -> dict[str, np.ndarray]:
        whole = {name: _whole(x) for name, x in arrays.items()}
        return {numbered(n, i): x[i] for n, x in whole.items() for i in range(self.counts[n])}

    def restore(self, state: Mapping[str, Mapping[str, np.ndarray]], count: int) -> None:
        def stacked(arrays: Mapping[str, np.ndarray]) -> Weights:
            found = {}
            for name, x in self.parameters.items():
                array = np.stack([arrays[numbered(name, i)] for i in range(self.counts[name])])
                found[name] = _spread(array, x.sharding)
            return found

        self.parameters = stacked(state["parameters"])
        self.ema = stacked(state[EMA]) if self.ema else {}
        first, second = (stacked(state[kind]) for kind in MOMENTS)
        adam, *rest = self.moments
        steps = jnp.asarray(count, jnp.int32)
        self.moments = (adam._replace(count=steps, mu=first, nu=second), *rest)


def _spread(array: np.ndarray, sharding: Sharding) -> Array:
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def _whole(array: Array) -> np.ndarray:
    if not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
