"""Lowered graphs on JAX devices: one network, and the denoise loop."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, ShapeDtypeStruct, lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from ltx2rt.backend import overlapped
from ltx2rt.graph.interpret import NUMPY_DTYPES
from ltx2rt.graph.ir import Graph, Value
from ltx2rt.passes.heads import is_grouped
from ltx2rt.passes.loop import taken_apart
from ltx2rt.placement.cost import flops
from ltx2rt_tpu.as_run import as_run
from ltx2rt_tpu.lower import run
from ltx2rt_tpu.ops import ON_TPU, OPS
from ltx2rt_tpu.ops.arrays import ONCE
from ltx2rt_tpu.ops.exchanges import BY_PAIRS, HEADS_BY_PAIRS
from ltx2rt_tpu.ops.products import ONCE_ON_V6E
from ltx2rt_tpu.roll import parts, roll
from ltx2rt_tpu.weights import Weights, abstract_weights, is_streamed, weight_specs, weights_on

if TYPE_CHECKING:
    from ltx2rt_tpu.stream import Layered

# Without the first nothing else runs while heads travel; the second lets all permutations of two
# groups of heads travel at once.
ASYNC: dict[str, Any] = dict(
    xla_tpu_enable_async_all_to_all=True, xla_max_concurrent_async_collective_permutes=32
)
EFFORT = 19  # O1 of XLA's `optimization_level`, of O0 to O3
COMPILERS = 16  # at a time: each takes some hundred MB
# threads that compile ahead take turns: they are Python, and the first program shall be first
TRACING = Lock()
# On a CPU most of a first run is compiling: with these the demo's takes 20 s instead of 35, and
# runs as fast.
LEVEL = "xla_backend_optimization_level"
ON_CPU: dict[str, Any] = {LEVEL: 1, "xla_cpu_use_fusion_emitters": False}
# Programs of less than SMALL FLOP, whose loops activate fewer samples than SHORT, are compiled at
# level 0: that halves XLA's share of the demo, but a vocoder's loop takes five times as long to run.
SMALL, SHORT = 3e10, 4e6


@cache
def compilations() -> list[float]:
    """Seconds of every compilation since the first call, also of those that the disk saved."""
    seen: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seen


@cache
def _options_on_cpu() -> dict[str, Any]:
    """`ON_CPU` but for what XLA_FLAGS decide and what this XLA does not know."""
    flags, here = os.environ.get("XLA_FLAGS", ""), jax.local_devices(backend="cpu")[0]
    options = {}
    for name, value in ON_CPU.items():
        with suppress(jax.errors.JaxRuntimeError), jax.default_device(here):
            if name not in flags:
                jax.jit(lambda: 0).lower().compile({name: value})
                options[name] = value
    return options


def compiler_options(graph: Graph, place: Sharding) -> dict[str, Any]:
    """Compiler options of `graph`'s programs on the devices of `place`."""
    options = _options_on_cpu() if next(iter(place.device_set)).platform == "cpu" else {}
    loops = [node for node in graph.nodes if node.op == "res_blocks"]
    samples = sum(node.inputs[0].type.num_elements * len(node.args["dilations"]) for node in loops)
    little = flops(graph) < SMALL and samples < SHORT
    return options | {LEVEL: 0} if LEVEL in options and little else options


def on_mesh(function: Callable, place: Sharding, *specs: Any, out: Any) -> Callable:
    """`function` on every device of the mesh, so that XLA communicates only where the graph does;
    itself without a mesh. specs, out: how its arguments and its results lie."""
    if not isinstance(place, NamedSharding):
        return function
    return jax.shard_map(function, mesh=place.mesh, in_specs=specs, out_specs=out, check_vma=False)


def is_tpu(place: Sharding) -> bool:
    return next(iter(place.device_set)).platform == "tpu"


def device_kind(place: Sharding) -> str:
    """`Backend.device_kind` of the devices."""
    return "tpu" if is_tpu(place) else "cpu"


def waits_for_exchanges(place: Sharding) -> bool:
    """Whether the devices compute during permutations, and during no other exchange."""
    return next(iter(place.device_set)).device_kind == "TPU v6 lite"


def ops_for(place: Sharding) -> dict[str, Callable[..., Any]]:
    return OPS | ON_TPU if is_tpu(place) else OPS


def own(place: Sharding) -> P:
    """Sharding of per-device arrays: one after the other along a first axis."""
    return P(place.mesh.axis_names if isinstance(place, NamedSharding) else None)


class Ahead(ABC):
    """A program that another thread may compile before it is called."""

    _compiling: Future[None] | None = None

    @abstractmethod
    def compile_now(self, each: bool) -> None:
        """each: for `Backend.each`."""

    def compile_ahead(self, pool: ThreadPoolExecutor, each: bool) -> Future[None]:
        if self._compiling is None or self._compiling.cancelled():
            self._compiling = pool.submit(self.compile_now, each)
        return self._compiling

    def ready(self) -> None:
        """Wait for the thread that compiles it; if it is still queued, compile it here."""
        if (compiling := self._compiling) is not None and not compiling.cancel():
            self._compiling = None if compiling.exception() else compiling
            compiling.result()

    def release(self) -> None:
        self._compiling = None


class Program(Ahead):
    """One lowered graph under one jit; `weights`: arrays by name, `*` names stacked over layers."""

    local: Any = tuple  # the shape in which `shared` takes an array

    def __init__(self, graph: Graph, place: Sharding, unrolled: bool):
        self.graph = as_run(graph, device_kind(place))
        self.place, self.unrolled, self.ops = place, unrolled, ops_for(place)
        options = compiler_options(graph, place)
        # for a jit of somebody's own, in which no other may have options
        whole, each = (partial(self._run, lie) for lie in (P(), own(place)))
        self.nested: Any = jax.jit(whole)
        self.function: Any = jax.jit(whole, compiler_options=options)
        self.shared: Any = jax.jit(each, compiler_options=options)
        self._layered: Layered | None = None

    def release(self) -> None:
        super().release()
        self._layered = None
        for made in (self.nested, self.function, self.shared):
            made.clear_cache()

    def lowered(self, each: bool = False) -> Lowered:
        """Lower it for a call, or for `together`."""
        inputs, place = self.graph.inputs, self.place
        weights = abstract_weights(self.graph, place)
        if not each or not isinstance(place, NamedSharding):
            return self.function.lower(weights, abstract(inputs, place))
        stacked = {name: on_each(x) for name, x in abstract(inputs, place).items()}
        return self.shared.lower(weights, stacked)

    def compile_now(self, each: bool) -> None:
        with TRACING:
            lowered = self.lowered(each)
        lowered.compile()

    def _run(self, lie: P, weights: Weights, inputs: dict[str, Array]) -> dict[str, Array]:
        """Run the graph. lie: how inputs and outputs do."""
        run_all = on_mesh(self._local, self.place, weight_specs(self.graph), lie, out=lie)
        return run_all(weights, inputs)

    def _local(self, weights: Weights, inputs: dict[str, Array]) -> dict[str, Array]:
        ordered = [inputs[name] for name in self.graph.inputs]
        found = run(self.graph, weights, ordered, self.unrolled, self.ops)
        return dict(zip(self.graph.outputs, found, strict=True))

    def __call__(self, weights: Weights, inputs: Mapping[str, Any]) -> dict[str, Array]:
        self.ready()
        uploaded = {name: upload(self.graph, name, x, self.place) for name, x in inputs.items()}
        hosted = (name for name in self.graph.all_params() if is_streamed(weights[name]))
        if names := frozenset(hosted):
            return self.layered(names)(weights, uploaded)
        return self.function(weights_on(self.place, self.graph, weights), uploaded)

    def layered(self, hosted: frozenset[str]) -> Layered:
        """hosted: names of the weights with layers in the host's memory."""
        from ltx2rt_tpu.stream import Layered

        if self._layered is None or self._layered.hosted != hosted:
            self._layered = Layered(self.graph, self.place, hosted, self.ops)
        return self._layered


class Assembled(Ahead):
    """A lowered graph as executables compiled side by side: the loops that `roll` makes, and what
    lies between. Each device of a mesh runs all of them, on its own inputs and whole weights.

    For the vocoder: its hundreds of small unlike convolutions and filters would keep the TPU
    compiler busy for a quarter of an hour. Compiling with `EFFORT` takes half of the time of full
    effort. Between executables an array has no axes of size 1, which a TPU would rearrange.
    """

    def __init__(self, graph: Graph, place: Sharding):
        self.graph = roll(as_run(graph, device_kind(place)))
        self.place, self.ops, self.local = place, ops_for(place), _flat
        self.parts = parts(self.graph)
        last = {id(v): i for i, part in enumerate(self.parts) for v in part.inputs.values()}
        for v in self.graph.outputs.values():
            last.pop(id(v), None)
        # values that nothing reads after a part
        self.dropped = [[key for key in last if last[key] == i] for i in range(len(self.parts))]

    @cached_property
    def executables(self) -> list[Any]:
        return self.compile()

    def release(self) -> None:
        super().release()
        vars(self).pop("executables", None)

    def compile_now(self, each: bool) -> None:
        _ = self.executables

    def compile(
        self,
        options: Mapping[str, Any] | None = None,
        finished: Callable[[Graph], None] | None = None,
    ) -> list[Any]:
        """The executables. finished: called with each part, of which one at a time is compiled."""
        options = {**(options or {})}
        if jax.config.values["jax_optimization_level"] == "UNKNOWN":  # the user's own counts
            options["optimization_level"] = EFFORT
        pool = ThreadPoolExecutor(1 if finished else min(COMPILERS, os.cpu_count() or 1))

        def compiled(part: Graph, lowered: Lowered) -> Any:
            executable = lowered.compile(compiler_options(part, self.place) | options)
            if finished:
                finished(part)
            return executable

        try:
            with TRACING:
                started = [pool.submit(compiled, part, self._lowered(part)) for part in self.parts]
            return [one.result() for one in started]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interrupt waits for no compiler

    def _lowered(self, part: Graph) -> Lowered:
        place, whole, ends = self.place, self.graph.params.values(), self.graph.outputs.values()
        made = [v.type.shape if v in ends else _flat(v.type.shape) for v in part.outputs.values()]

        def run_part(*operands: Array) -> tuple[Array, ...]:
            given = map(jnp.reshape, operands, (v.type.shape for v in part.inputs.values()))
            return tuple(map(jnp.reshape, run(part, {}, [*given], ops=self.ops), made))

        run_part.__name__ = part.name
        operands, lie = [], []
        for v in part.inputs.values():
            like = ShapeDtypeStruct(_flat(v.type.shape), v.type.dtype, sharding=place)
            lie.append(P() if v in whole else own(place))
            operands.append(like if v in whole else on_each(like))
        return jax.jit(on_mesh(run_part, place, *lie, out=own(place))).lower(*operands)

    def __call__(self, weights: Weights, inputs: Mapping[str, Any]) -> dict[str, Array]:
        return {name: together([(self, weights, inputs)], name)[0] for name in self.graph.outputs}

    def shared(self, weights: Weights, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run every device on its slice of the inputs along their first axis."""
        graph = self.graph
        env = {id(v): inputs[name] for name, v in graph.inputs.items()}
        env |= {
            id(v): weights[name].reshape(_flat(v.type.shape)) for name, v in graph.params.items()
        }
        steps = zip(self.parts, self.executables, self.dropped, strict=True)
        for part, executable, dropped in steps:
            results = executable(*(env[id(v)] for v in part.inputs.values()))
            env |= {id(v): x for v, x in zip(part.outputs.values(), results, strict=True)}
            for key in dropped:
                del env[key]
        return {name: env[id(v)] for name, v in graph.outputs.items()}


def _flat(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1) or (1,)


Call = tuple[Program | Assembled, Weights, Mapping[str, Any]]


def together(calls: Sequence[Call], output: str) -> list[Any]:
    """`output` of each of a program's calls, at most one per device; weights are whole on each.
    Nothing communicates, but results of other processes' devices are gathered."""
    program, weights, _ = calls[0]
    (count, parts), stacked = apart(program.place), {}
    program.ready()
    for name, v in program.graph.inputs.items():
        rows = [np.asarray(inputs[name], NUMPY_DTYPES[v.type.dtype]) for *_, inputs in calls]
        rows += [np.zeros_like(rows[0])] * (count - len(rows))
        whole = np.concatenate([row.reshape(program.local(v.type.shape)) for row in rows])
        stacked[name] = jax.make_array_from_callback(whole.shape, parts, whole.__getitem__)
    y = program.shared(weights_on(program.place, program.graph, weights), stacked)[output]
    if not y.is_fully_addressable:
        return np.split(multihost_utils.process_allgather(y, tiled=True), count)[: len(calls)]
    shards = sorted(y.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [shard.data for shard in shards[: len(calls)]]


class Loop(Ahead):
    """The denoise loop: what leaves it runs once, the steps are one executable with traced bounds.
    On a mesh every device keeps its own prepared values, under a new first axis over all mesh
    axes."""

    def __init__(self, graph: Graph, place: Sharding, unrolled: bool):
        self.graph, self.place, self.unrolled = graph, place, unrolled
        halved = as_run(graph, device_kind(place), steps=True)
        self.parts, self.ops = taken_apart(halved), ops_for(place)
        options, before = (compiler_options(g, place) for g in (graph, self.parts.before))
        if is_tpu(place):
            self.ops = self.ops | (ONCE_ON_V6E if waits_for_exchanges(place) else ONCE)
        if halved is not graph:
            options = options | ASYNC
            if waits_for_exchanges(place):
                self.ops = self.ops | BY_PAIRS | (HEADS_BY_PAIRS if is_grouped(halved) else {})
        self.before: Any = jax.jit(self._before, compiler_options=before)
        self.steps: Any = jax.jit(self._steps, compiler_options=options)

    def release(self) -> None:
        super().release()
        self.before.clear_cache()
        self.steps.clear_cache()

    def _before_arguments(self) -> tuple[Any, ...]:
        before = self.parts.before
        return abstract_weights(before, self.place), abstract(before.inputs, self.place)

    def lowered_before(self) -> Lowered:
        return self.before.lower(*self._before_arguments())

    def lowered_steps(self) -> Lowered:
        body, place = self.parts.body, self.place
        found = self.before.eval_shape(*self._before_arguments())
        like = partial(ShapeDtypeStruct, sharding=apart(place)[1])
        prepared = {name: like(x.shape, x.dtype) for name, x in found.items()}
        other = body.inputs.keys() - prepared.keys() - set(self.parts.state)
        constants = {name: v for name, v in self.graph.inputs.items() if name in other}
        bound, state = ShapeDtypeStruct((), "int32"), abstract(body.outputs, place)
        weights = abstract_weights(body, place)
        return self.steps.lower(weights, prepared, abstract(constants, place), state, bound, bound)

    def compile_now(self, each: bool) -> None:
        for lower in (self.lowered_before, self.lowered_steps):
            with TRACING:
                lowered = lower()
            lowered.compile()

    def _before(self, weights: Weights, inputs: dict[str, Array]) -> dict[str, Array]:
        graph = self.parts.before

        def local(weights, inputs):
            ordered = [inputs[name] for name in graph.inputs]
            results = run(graph, weights, ordered, self.unrolled, self.ops)
            return {name: x[None] for name, x in zip(graph.outputs, results, strict=True)}

        run_all = on_mesh(local, self.place, weight_specs(graph), P(), out=own(self.place))
        return run_all(weights, inputs)

    def _steps(self, weights, prepared, constants, outputs, first, last):
        """Steps first..last-1 of one loop; a host callback would keep it off the disk."""
        body, data, state = self.parts.body, set(self.parts.data), self.parts.state

        def local(weights, prepared, constants, outputs, i):
            values = constants | {name: x[0] for name, x in prepared.items()}
            for name in filter(data.__contains__, values):
                values[name] = lax.dynamic_index_in_dim(values[name], i, 0, False)
            values |= {name: outputs[name] for name in state}
            ordered = [values[name] for name in body.inputs]
            results = run(body, weights, ordered, self.unrolled, self.ops)
            return dict(zip(body.outputs, results, strict=True))

        weights_lie, prepared_lie = weight_specs(body), own(self.place)
        step = on_mesh(local, self.place, weights_lie, prepared_lie, P(), P(), P(), out=P())

        def one(i, outputs):
            return step(weights, prepared, constants, outputs, i)

        return lax.fori_loop(first, last, one, outputs)

    def __call__(
        self, weights: Weights, inputs: Mapping[str, Any], num_steps: int, start: int = 0
    ) -> Iterator[dict[str, Array]]:
        self.ready()
        before, body, state = self.parts.before, self.parts.body, self.parts.state
        place, graph = self.place, self.graph
        given = {name: upload(graph, name, inputs[name], place) for name in graph.inputs}
        entering = {name: given[name] for name in before.inputs}
        prepared = self.before(weights_on(place, before, weights), entering)
        known = {*prepared, *state}
        constants = {name: given[name] for name in body.inputs if name not in known}
        made = body.outputs.items()
        zeros = {n: np.zeros(v.type.shape, NUMPY_DTYPES[v.type.dtype]) for n, v in made}
        outputs = {n: given[n] if n in state else replicate(x, place) for n, x in zeros.items()}
        laid = weights_on(place, body, weights)

        def started(outputs: dict[str, Array]) -> Iterator[dict[str, Array]]:
            for i in map(np.int32, range(start, num_steps)):
                outputs = self.steps(laid, prepared, constants, outputs, i, i + np.int32(1))
                yield outputs

        for finished in overlapped(started(outputs), 1):
            yield jax.block_until_ready(finished)


def apart(place: Sharding) -> tuple[int, Sharding]:
    """Return the number of devices, and a sharding that gives each one slice of the first axis."""
    if isinstance(place, NamedSharding):
        return place.mesh.size, NamedSharding(place.mesh, own(place))
    return 1, place


def on_each(x: ShapeDtypeStruct) -> ShapeDtypeStruct:
    """An array like x for each device, instead of one for all."""
    count, parts = apart(x.sharding)
    return ShapeDtypeStruct((count * x.shape[0], *x.shape[1:]), x.dtype, sharding=parts)


def abstract(values: Mapping[str, Value], place: Sharding) -> dict[str, ShapeDtypeStruct]:
    """Inputs or outputs, whole on every device."""
    like = partial(ShapeDtypeStruct, sharding=place)
    return {name: like(v.type.shape, v.type.dtype) for name, v in values.items()}


def upload(graph: Graph, name: str, value: Any, place: Sharding) -> Array:
    """The input `name` of `graph` on all devices, committed; a wrong shape is a ValueError."""
    value = value if isinstance(value, Array) else np.asarray(value)
    dtype = graph.input_type(name, value.shape).dtype
    # replicate also commits: jit compiles once more for an argument that is not committed to its
    # device.
    return replicate(value.astype(NUMPY_DTYPES[dtype], copy=False), place)


def replicate(array: np.ndarray | Array, place: Sharding) -> Array:
    """`array` on every device of `place`; each process puts its copy, uncompared."""
    if place.is_fully_addressable or isinstance(array, Array):
        return jax.device_put(array, place)
    return jax.make_array_from_callback(array.shape, place, lambda _: array)
