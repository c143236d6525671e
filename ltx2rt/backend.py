"""The interface of a backend, and how one is found by name: through the entry-point group
`ltx2rt.backends`, so that the core never imports torch or jax, and names none of them.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ltx2rt.errors import InputError
from ltx2rt.notes import note
from ltx2rt.suggest import hint

if TYPE_CHECKING:
    import numpy as np

    from ltx2rt.graph.ir import Cut, Graph


class TensorSource(Protocol):
    """Tensors of a checkpoint under their canonical (official single-file) names."""

    def names(self) -> Iterable[str]: ...
    def info(self, name: str) -> Any:
        """`.shape`, `.dtype` and `.nbytes`, read only from the header."""

    def read(self, name: str, *cuts: Cut) -> Any:
        """The tensor, or a slice of it: a numpy view (bfloat16 as ml_dtypes.bfloat16) of memory that
        is not the reader's; or a new array that the backend's own `merge` made."""


class Program(Protocol):
    """A lowered graph. Weights are arguments: one program serves the weights of both stages."""

    graph: Graph

    def __call__(self, weights: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs by name as device arrays. inputs: numpy or device arrays by name."""

    def release(self) -> None:
        """Drop the built program and its memory; a later call builds it again."""


class Loop(Protocol):
    """A lowered graph that ends in its loop over steps (`passes.loop`)."""

    graph: Graph

    def __call__(
        self, weights: Any, inputs: Mapping[str, Any], num_steps: int, start: int = 0
    ) -> Iterator[dict[str, Any]]:
        """The body's outputs after each of the first `num_steps` steps, from step `start` on,
        yielded once that step has really finished. inputs: the graph's, with data for all of its
        steps. At most one step is queued beyond the one that is waited for; once the iterator is
        closed, none is."""

    def release(self) -> None:
        """Like `Program.release`, also of recorded steps. Not while an iterator is in use."""


@dataclass(frozen=True)
class AdamW:
    """Constants of the optimiser. max_norm: of all gradients together, to which they are scaled
    down. ema: decay of an average of the parameters, None: there is none."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_norm: float = 1.0
    ema: float | None = None


# How a backward pass gets a block's values: recompute all from its inputs; keep all; recompute all
# except results of exchanges.
REMAT = ("block", "none", "exchanges")
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, as torch calls them
EMA = "ema"  # the average of the parameters, in a state


class Trainer(Protocol):
    """A training step with its parameters and the optimiser's moments, float32, on the mesh. Arrays
    in and out are whole and named as in a checkpoint, one for each block."""

    graph: Graph

    def accumulate(
        self, inputs: Mapping[str, Any], weights: Mapping[str, float]
    ) -> dict[str, np.ndarray]:
        """Add the gradient of the sum of weights[loss] x mean(loss) to what has been accumulated
        since `update`. inputs: those that begin with the axis B hold the samples of all devices of
        the mesh axis `data`, one after the other. Returns the losses of all samples, f32[samples]
        by output name."""

    def losses(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The losses that `accumulate` would return, and no gradient."""

    def update(self, rate: float) -> dict[str, float]:
        """Step the optimiser and clear the gradient. Returns the squared norm of each one before
        clipping, by declared name; where one is not finite, nothing changes."""

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """`parameters`, by the names of MOMENTS the optimiser's, and EMA if there is an average.
        All processes must ask."""

    def restore(self, state: Mapping[str, Mapping[str, np.ndarray]], count: int) -> None:
        """Take what `state` gave after `count` updates."""


def index_of(graphs: Sequence[Graph], inputs: Mapping[str, Any]) -> int:
    """Index of the graph that takes samples of these inputs' sizes."""
    for i, graph in enumerate(graphs):
        own = {n: v.type.shape for n, v in graph.inputs.items() if v.type.axes[:1] == ("B",)}
        if all(tuple(inputs[name].shape[1:]) == shape[1:] for name, shape in own.items()):
            return i
    raise ValueError(f"no graph of {len(graphs)} has the sizes of the inputs")


Call = tuple[Program, Any, Mapping[str, Any]]  # a program, its weights, its inputs


@dataclass(frozen=True)
class DeviceInfo:
    """kind: "cpu", or what the framework calls its accelerators; name: the driver's for this one.
    total_bytes, free_bytes: its memory now (the host's, on a CPU). count: of devices like it that a
    mesh can have, other hosts' included; hosts: whose processes drive them. reserve_bytes,
    reserve_share: a run leaves so many bytes and such a share free for the framework's pools,
    workspaces and fragmentation. recorded_bytes: memory held by
    recorded steps; the next recording reuses it.
    """

    kind: str
    name: str
    total_bytes: int
    free_bytes: int
    count: int = 1
    hosts: int = 1
    reserve_bytes: int = 0
    reserve_share: float = 0.0
    recorded_bytes: int = 0

    def room_bytes(self, max_memory: float | None = None, held_bytes: int = 0) -> int:
        """Bytes to plan with: free and held memory, at most `max_memory` GB, less the reserve."""
        most = min(self.free_bytes + held_bytes, 1e9 * (max_memory or math.inf))
        return int(most * (1 - self.reserve_share) - self.reserve_bytes)

    def idle_bytes(self, max_memory: float | None) -> int:
        """Return `room_bytes` if nothing else used the device."""
        return replace(self, free_bytes=self.total_bytes).room_bytes(max_memory)


class DoesNotFit(Exception):
    """A program needs more memory than the device has that it is compiled for; says how much."""


@dataclass(frozen=True)
class Compiled:
    """One program as its compiler left it; counts are of one call, bytes of one device.
    compile_cpu_s: processor time of all threads. collectives: executions by kind, loops multiplied;
    received_bytes: by all of them. weights_bytes: all arguments as the compiler lays them out;
    temp_bytes and output_bytes: what a call needs besides. times_s: estimated by the compiler's
    code, by class of instruction, exposed exchanges among them; None if not asked for.
    """

    compile_s: float
    compile_cpu_s: float
    collectives: Mapping[str, int]
    received_bytes: int
    weights_bytes: int
    temp_bytes: int
    output_bytes: int
    times_s: Mapping[str, float] | None = None

    @property
    def peak_bytes(self) -> int:
        return self.weights_bytes + self.temp_bytes + self.output_bytes


class Backend(Protocol):
    """One device (or mesh) under one framework."""

    name: str
    device_kind: str  # as DeviceInfo.kind
    mesh: Mapping[str, int]  # sizes of the mesh axes; empty on one device
    is_main: bool  # whether this process prints and writes
    runs: bool  # whether it runs programs, rather than standing for devices that are not here
    num_processes: int  # that take work in turns by `on`; 1 where every process runs every program
    versions: dict[str, str]

    @property
    def num_built(self) -> int:
        """Programs lowered, recorded or compiled so far, hits of the cache on disk included."""

    def load(
        self,
        graphs: Iterable[Graph],
        source: TensorSource,
        base: Any = None,
        changed: Set[str] = frozenset(),
        streamed: Set[tuple[str, int]] = frozenset(),
        road: str = "pinned",
    ) -> Any:
        """Weights of all parameters of `graphs`, on the device, each cast once to the graph's
        dtype. base: weights loaded before, which share every tensor that `changed` does not name.
        streamed: pieces that stay in the host's memory (`placement.stream`), of a backend whose
        factory `streams`; road: how they reach the device, of `placement.stream.ROADS`. Raises
        InputError if they have no room there."""

    def park(self, weights: Any) -> Any:
        """A copy of `weights` in the host's memory; None if it cannot hold them."""

    def unpark(self, kept: Any, left: Any) -> Any:
        """Parked weights, on the device again: in the memory of `left`, weights that are used no
        more, where it fits. `left` is emptied."""

    def lower(self, graph: Graph, layers: str = "scan", compile: bool = False) -> Program:
        """layers: "scan" runs a repeat's body as a loop, "unrolled" writes it out."""

    def lower_loop(self, graph: Graph, layers: str = "scan", compile: bool = False) -> Loop:
        """Like `lower`, for a graph that ends in a loop over steps."""

    def trainer(
        self,
        graph: Graph,
        weights: Any,
        optimiser: AdamW,
        remat: str = "block",
        others: Sequence[Graph] = (),
        *,
        deterministic: bool = False,
    ) -> Trainer:
        """The step of a local graph with adapters. remat: of REMAT. others: graphs of batches of
        other sizes. deterministic: a step gives the same bits each time."""

    def compile_ahead(
        self, programs: Iterable[tuple[Program | Loop, bool]]
    ) -> Sequence[Future[None]]:
        """Begin to compile what it lowered, in this order, while other things run; a call waits for
        its own program. With each whether `each` calls it. Returns what can be cancelled. Where
        compiling takes no time it reads none of them."""

    def merge(self, weight: np.ndarray, factors: Sequence[Any], rounded: bool) -> Any:
        """`weights.lora.merge` on the device, sums in another order, for `load`'s source."""

    def each(self, calls: Iterable[Call], output: str) -> Generator[Any]:
        """The output of every call, in order, as what `to_host` takes; all devices share the calls.

        On a process that is not the main one, None for each. A result is handed out once later
        calls keep the devices busy, at most one on each. Inputs and the output lead with an axis B.

        Every process must iterate over the same calls and stop after the same result, or by an
        exception of `calls` at the same call; each takes a call after the same results, so `calls`
        may `agree` on whether there is another one. Closing the iterator waits for what is under
        way between processes.
        """

    def agree(self, flag: bool) -> bool:
        """Whether any process says so. All must ask; no device waits, no recording has it."""

    def to_host(self, array: Any) -> np.ndarray:
        """float32 (or int32) numpy copy of a device array; waits for it."""

    def synchronize(self) -> None:
        """Wait until the device has finished."""

    def trim(self, recorded: bool = False) -> None:
        """Give memory that nothing uses any more back to the device, if the framework keeps it.
        recorded: also free recorded steps; programs that were not released record theirs again."""

    def limit(self, max_memory: float | None) -> None:
        """Take at most this many GB of the device from now on (None: all of it), if the framework
        has such a limit. Its cache counts."""

    def attend_by(self, name: str, dtype: str) -> None:
        """Compute attention by this kernel, of `session.options.ATTENTION`, from now on; operands
        that it does not take go where "auto" sends them. dtype: of the run. Raises InputError if it
        takes none here."""

    def device(self) -> DeviceInfo: ...
    def peak_bytes(self) -> int | None:
        """Peak device memory since the start, if the framework tells."""


T = TypeVar("T")


def overlapped(started: Iterable[T], later: int) -> Iterator[T]:
    """Every item in order, once `later` more of them are started."""
    under_way: deque[T] = deque()
    for item in started:
        under_way.append(item)
        if len(under_way) > later:
            yield under_way.popleft()
    yield from under_way


class BackendFactory(Protocol):
    """Facts of a backend before it exists. To make one, and to ask it anything but what says so,
    imports no framework; where that is missing, the others raise ImportError. A factory derives
    from it, or has all of its methods.
    """

    name: str
    accelerator: str  # its accelerator, in a word: "GPU", "TPU"
    process_per_device: bool  # else one process drives all devices of a host
    packages: tuple[str, ...]  # the distributions that it computes with, its framework first
    streams: Collection[str]  # networks whose layers `Backend.load` can keep in the host's memory
    # kinds of devices on which a loop's steps are recorded, and keep their memory
    recorded: Container[str] = ()
    hides: bool = False  # an all-reduce travels while nodes compute; in training they always wait
    decodes: bool = False  # a product decodes rows of 8 bits as it reads them

    def device_kinds(self) -> Iterable[Any]:
        """The devices that can be planned for (`placement.devices.DeviceKind`)."""

    def as_run(self, graph: Graph, device_kind: str, **how: bool) -> Graph:
        """The graph that a device of `Backend.device_kind` runs for a placed one: its nodes after
        the backend's own passes. `lower` and `lower_loop` lower it; times, memory and the choice of
        a mesh are read off it. steps: of a denoise step, or of the loop over all. compile: as
        `lower` takes it. train: of a training step, which is differentiated."""

    def rank_and_size(self, environment: Mapping[str, str]) -> tuple[int, int]:
        """(this process, their number) of a launch. InputError if the environment is wrong."""

    def most_processes(self, device: str) -> int:
        """Processes that `device` of this host can serve; 1 unless each device has one."""
        return 1

    def one_device(self, number: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Changes to the environment of a process that shall see only this device of the host;
        asked where `most_processes` is above 1."""
        return {}

    def rendezvous(self) -> Any:
        """A new connection to the launch's store (`ranks.crew.Store`). Imports the framework."""

    def keep_compiled(self, root: Path) -> None:
        """Cache this process's compiled programs under `root` and reuse the ones there. Imports the
        framework. By default nothing: the framework does so by itself or compiles nothing."""
        return None

    def ahead_compiler(
        self, topology: str, mesh: Mapping[str, int], timed: bool = False
    ) -> Callable[[Graph, str | None], Compiled]:
        """A compiler of placed graphs for devices that are absent; one per process. Imports the
        framework. timed: with `times_s`.

        Its second argument says how the graph runs: "each" on every device's own inputs, as in
        `Backend.each`; of a loop over steps, "before" is what runs once before it, "step" one of
        its steps; of a training step, a word of REMAT is one batch forward and backward. Raises
        InputError if the compiler is not installed, or does not know the topology.
        """
        raise InputError(
            f"backend {self.name} compiles on the device that runs, not for one that is absent"
        )

    def why_not_attend(self, name: str) -> str | None:
        """Why no device of this backend can `Backend.attend_by` this name, or None."""
        return (
            None
            if name == "auto"
            else f"backend {self.name} has one kernel for each device; leave it out"
        )

    def profile_key(self, device: DeviceInfo) -> str:
        """The name under which `placement.profiles` knows devices like it."""
        return device.kind

    def takes_all(self, device: DeviceInfo) -> bool:
        """Whether a run without a mesh takes all devices like it, not only this one."""
        return False

    def open(self, device: str, mesh: Mapping[str, int]) -> Backend:
        """See `get_backend`. Imports the framework."""


DEVICE_FILES = {"GPU": ("nvidia[0-9]*",), "TPU": ("accel[0-9]*", "vfio/[0-9]*")}  # by accelerator


@cache
def _entry_points(path: tuple[str, ...]) -> EntryPoints:
    """Entry points of the packages on `path`, which is `sys.path`; cached by path."""
    return entry_points(group="ltx2rt.backends")


def backend_names() -> list[str]:
    return sorted(e.name for e in _entry_points(tuple(sys.path)))


def chosen_backend(devices: Path = Path("/dev"), quiet: bool = False) -> str:
    """The backend for a run that names none: of those installed, the first with a device here, or
    the first. Unless quiet, it prints a choice between devices. Raises InputError if none is
    installed."""
    factories = [get_factory(name) for name in backend_names()]
    installed = [f for f in factories if find_spec(f.packages[0])]
    if not installed:
        raise InputError(
            "--backend: none is installed; in the clone: pip install '.[cuda]', or pip "
            "install '.[tpu]'"
        )
    here = [f for f in installed if _has_device(f, devices)]
    name = (here or installed)[0].name
    if len(here) > 1 and not quiet:
        devices_here = " and ".join(f"a {f.accelerator}" for f in here)
        note(f"backend {name}: {devices_here} are here", prefix="")
    return name


def _has_device(factory: BackendFactory, devices: Path) -> bool:
    patterns = DEVICE_FILES.get(factory.accelerator, ())
    return any(any(devices.glob(pattern)) for pattern in patterns)


def get_factory(name: str) -> BackendFactory:
    """The object of the entry point `name` in the group `ltx2rt.backends`. Raises InputError."""
    found = [e for e in _entry_points(tuple(sys.path)) if e.name == name]
    if not found:
        known = backend_names()
        advice = hint(name, known)
        if name.lower() == "cpu":
            advice = "; for a CPU add --device cpu to one of them"
        raise InputError(f"unknown backend {name!r}; known backends: {', '.join(known)}{advice}")
    with _installed(name):
        return found[0].load()


def get_backend(name: str, device: str = "auto", mesh: Mapping[str, int] | None = None) -> Backend:
    """The backend `name` on `device` ("auto", "cpu", or its accelerator). Raises InputError. mesh:
    sizes of the mesh axes over all devices; none: one device."""
    with _installed(name):
        return get_factory(name).open(device, mesh or {})


def get_rendezvous(name: str) -> Callable[[], Any]:
    """Function that connects the processes of a launch to their store."""
    return _installed(name)(get_factory(name).rendezvous)


def get_ahead_compiler(
    name: str, topology: str, mesh: Mapping[str, int], timed: bool = False
) -> Callable[[Graph, str | None], Compiled]:
    """`BackendFactory.ahead_compiler`. InputError if it is not installed."""
    with _installed(name):
        return get_factory(name).ahead_compiler(topology, mesh, timed)


def keep_compiled(name: str, root: Path) -> None:
    """`BackendFactory.keep_compiled`. InputError if it is not installed."""
    with _installed(name):
        get_factory(name).keep_compiled(root)


@contextmanager
def _installed(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise InputError(
            f"backend {name}: {error}; in its clone: pip install '.[{name}]'"
        ) from error
