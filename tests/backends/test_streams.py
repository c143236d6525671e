"""What runs at once: parts of a step on two streams have the bits of one stream, and nothing is
read or taken before what it waits for; exchanges of several communicators have an order."""

import weakref
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ltx2rt_cuda import streams
from ltx2rt_cuda.device.cuda import Cuda, Pool
from ltx2rt_cuda.device.torch_device import Side
from ltx2rt_cuda.distributed import Position
from ltx2rt_cuda.lower import RepeatModule, lower
from ltx2rt_cuda.ops import OPS, arrived
from ltx2rt_cuda.streams import TwoStreams, in_parts
from placed_cases import case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.launches import step_graphs
from ltx2rt.backend import get_backend
from ltx2rt.graph.ops import COLLECTIVES
from ltx2rt.passes.fuse import fuse
from ltx2rt.passes.interleave import TOKENS, interleave
from ltx2rt.passes.rotate import rotate
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.testing import ArraySource

LARGE = ("linear", "linear_gelu", "attention")
NAMES = ["guided-2.0", "masked-2.3", "guided-2.5"]


class Stream:
    """Stands for a CUDA stream: `seen` is how much of each stream's work has ended before what it
    does next."""

    def __init__(self):
        self.done, self.seen = 0, {self: 0}

    def work(self) -> tuple:
        self.done += 1
        self.seen[self] = self.done
        return self, self.done

    def wait_stream(self, other) -> None:
        for stream, done in other.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), done)

    def has_seen(self, work: tuple) -> bool:
        stream, done = work
        return self.seen.get(stream, 0) >= done


class Races(TorchDispatchMode):
    """Notes in `found` what reads or writes memory that another stream may still write or use, and
    what takes memory that was given back to its stream while another may still use it, as torch's
    allocator does."""

    def __init__(self):
        super().__init__()
        self.stream = Stream()
        self.found: list[str] = []
        self.overlapped = 0  # ops that run while another stream does what they need not wait for
        # Of each storage that was made here: who made it, the last write, all uses, how many
        # tensors look at it.
        self.owner: dict[int, Stream] = {}
        self.wrote: dict[int, tuple] = {}
        self.uses: dict[int, list[tuple]] = {}
        self.tensors: dict[int, int] = {}
        self.given_back: dict[Stream, list[tuple]] = {}  # uses of what each stream may take again

    @contextmanager
    def on(self, stream: Stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, here = kwargs or {}, self.stream
        result, work = func(*args, **kwargs), here.work()
        self.overlapped += any(
            not here.has_seen((other, other.done)) for other in {*self.owner.values()} - {here}
        )
        infos = [a.alias_info for a in func._schema.arguments]
        operands = [
            (x, bool(info and info.is_write))
            for arg, info in zip(args, infos, strict=False)
            for x in tensors(arg)
        ]
        for x, writes in [*operands, *((x, True) for x in tensors(kwargs.get("out")))]:
            if (key := storage(x)) in self.owner:
                if not all(map(here.has_seen, self.uses[key] if writes else [self.wrote[key]])):
                    self.found.append(f"{func} {'writes' if writes else 'reads'}")
                self.uses[key].append(work)
                self.wrote |= {key: work} if writes else {}
        read = {storage(x) for x in tensors((args, kwargs))}
        for x in tensors(result):
            key = storage(x)
            if key not in self.owner and key not in read:
                self.owner[key], self.wrote[key], self.uses[key], self.tensors[key] = (
                    here,
                    work,
                    [work],
                    0,
                )
                self.given_back[here] = [
                    use for use in self.given_back.get(here, []) if not here.has_seen(use)
                ]
                self.found += [f"{func} takes"] if self.given_back[here] else []
            if key in self.owner:
                self.tensors[key] += 1
                weakref.finalize(x, self.dropped, key)
        return result

    def dropped(self, key: int) -> None:
        self.tensors[key] -= 1
        if not self.tensors[key]:
            self.given_back.setdefault(self.owner.pop(key), []).extend(self.uses.pop(key))
            del self.wrote[key], self.tensors[key]


def tensors(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


@contextmanager
def watched(monkeypatch):
    races = Races()
    with monkeypatch.context() as patched, torch.no_grad(), races:
        patched.setattr(torch.cuda, "current_stream", lambda: races.stream)
        patched.setattr(torch.cuda, "stream", races.on)
        yield races


def operands(one, graph) -> list:
    """Inputs and weights, on the CPU."""
    backend = get_backend("cuda", "cpu")
    program = backend.lower(graph)
    uploaded = [torch.from_numpy(np.asarray(one.inputs[name])) for name in graph.inputs]
    return [*uploaded, *program.arguments(backend.load([graph], ArraySource(one.params)))]


@pytest.mark.parametrize(
    "name,short_s", [*((name, 0.0) for name in NAMES), ("guided-2.3", streams.SHORT_S)]
)
def test_two_streams_have_the_bits_of_one_and_race_for_nothing(monkeypatch, name, short_s):
    """Down to one node a part, and as for a step of full size."""
    monkeypatch.setattr(streams, "SHORT_S", short_s)
    one = case(name)
    graph = fuse(rotate(one.graph))
    given = operands(one, graph)
    with torch.no_grad():
        expected = lower(graph, torch.device("cpu"))(*given)
    with watched(monkeypatch) as races:
        module = lower(graph, torch.device("cpu"), side=Side(Cuda(), Stream()))
        found = module(*given)
    assert sum(isinstance(part, TwoStreams) for part in module.modules()) >= 5
    assert not races.found and races.overlapped >= 50
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("deaf", ["side", "main"])
def test_the_check_sees_a_stream_that_does_not_wait(monkeypatch, deaf):
    """The one where they part, the other where they meet."""
    one = case("guided-2.3")
    graph = fuse(rotate(one.graph))
    given = operands(one, graph)
    with watched(monkeypatch) as races:
        side = Stream()
        listening = side if deaf == "side" else races.stream
        listening.wait_stream = lambda other: None
        lower(graph, torch.device("cpu"), side=Side(Cuda(), side))(*given)
    assert any(what.endswith("reads") for what in races.found)


def test_the_check_sees_memory_that_is_taken_too_early(monkeypatch):
    with watched(monkeypatch) as races:
        here, side = races.stream, Stream()
        x = torch.ones(3)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            torch.neg(x)
        del x
        torch.ones(3)
        assert len(races.found) == 1 and races.found[0].endswith("takes")
        here.wait_stream(side)
        torch.ones(3)
        assert len(races.found) == 1


def test_a_recording_begins_on_a_stream_on_which_nothing_runs(monkeypatch):
    """What runs is waited for, also where it fails."""
    pool = Pool.__new__(Pool)
    pool.id, pool.graphs = (0, 0), weakref.WeakSet()
    pool.start, pool.stream = Stream(), Stream()
    with watched(monkeypatch) as races:
        monkeypatch.setattr(
            torch.cuda, "graph", lambda graph, pool, stream, capture_error_mode: races.on(stream)
        )
        for fails in (False, True):
            with suppress(ZeroDivisionError), pool.recording(Stream()):
                torch.ones(3)
                1 / int(not fails)
            assert pool.start.done == 0 and pool.start.has_seen((pool.stream, pool.stream.done))
    assert pool.stream.done == 2


def test_the_streams_have_met_where_a_part_fails(monkeypatch):
    """A recording whose streams have not met does not end, and hides what has failed."""

    def fails():
        raise ZeroDivisionError

    for own, beside in ((fails, lambda: ()), (lambda: (), fails)):
        with watched(monkeypatch) as races:
            side = Stream()
            with suppress(ZeroDivisionError), torch.cuda.stream(side):
                torch.ones(3)
            with pytest.raises(ZeroDivisionError), races.on(races.stream):
                parts = SimpleNamespace(own=own, beside=beside, num_own=0, side=Side(Cuda(), side))
                TwoStreams.forward(parts)  # type: ignore[arg-type]
            assert races.stream.has_seen((side, side.done))


def test_a_block_in_which_devices_exchange_something_keeps_its_order():
    (repeat,) = fuse(case("forward-2.3").on(2)).repeats
    assert in_parts(repeat.body) == repeat.body.nodes


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_a_block_of_full_size_has_sound_beside_video(stage):
    """Every product and every attention whose queries are the sound's; the streams part ten times
    at most."""
    graph = fuse(rotate(step_graphs("ltx-2.3", (768, 512, 121, 1), "", None, (stage,))[stage]))
    for repeat in graph.repeats:
        pairs = [part for part in in_parts(repeat.body) if isinstance(part, tuple)]
        beside = [node for _, part in pairs for node in part.nodes]
        big = [node for part, _ in pairs for node in part.nodes]
        sound = [
            n
            for n in repeat.body.nodes
            if n.op in LARGE and "audio_tokens" in n.outputs[0].type.axes
        ]
        assert {id(n) for n in sound} <= {id(n) for n in beside}
        assert all("tokens" in n.outputs[0].type.axes for n in big if n.op in LARGE)
        assert len(pairs) <= 10


def test_exchanges_over_two_mesh_axes_are_never_under_way_at_once():
    """NCCL wants an order among its communicators. What travels over the same axis goes on doing
    so."""
    one = case("guided-2.3")
    placed = Placement(PROFILES["hopper"], {"sequence": 2, "tensor": 2}).local(
        one.graph, one.network
    )
    graph = fuse(interleave(rotate(placed), TOKENS))
    position = Position(
        graph.mesh, dict.fromkeys(graph.mesh, 0), {axis: axis for axis in graph.mesh}
    )
    (block,) = (
        m.block.layers[0]
        for m in lower(graph, torch.device("cpu"), position=position).modules()
        if isinstance(m, RepeatModule)
    )
    names = {OPS[op]: op for op in COLLECTIVES}
    nodes = list(block.graph.nodes)
    arriving = {node.args[0] for node in nodes if node.target is arrived}
    under_way = {node: "tensor" for node in nodes if node.op == "placeholder" and node in arriving}
    axes, hidden = set(), 0
    for node in nodes:
        if node.target is arrived:
            under_way.pop(node.args[0])
        elif node.target in names:
            axes.add(node.kwargs["group"])
            assert set(under_way.values()) <= {node.kwargs["group"]}, node
            if names[node.target] == "all_reduce":
                under_way |= {user: node.kwargs["group"] for user in node.users}
        hidden += node.target is OPS["linear"] and bool(under_way)
    assert axes == {"sequence", "tensor"} and hidden >= 6
