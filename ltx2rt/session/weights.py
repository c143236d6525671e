"""The weights of a session: sets on the device by network and LoRAs, each loaded once.

Decides what sets share: a set with other LoRAs shares every tensor that merges alike with the
nearest set of its network. And what the host keeps: a set that leaves an accelerator and will be
back waits in the memory of the host, if that has room, instead of being read and merged again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ltx2rt.backend import Backend
from ltx2rt.errors import InputError
from ltx2rt.graph import Graph
from ltx2rt.graph.ir import numbered
from ltx2rt.notes import note
from ltx2rt.passes.adapters import MARK, Adapters, tensors
from ltx2rt.placement.devices import host_memory
from ltx2rt.placement.stream import FILE, PINNED, Piece, pieces, slots_bytes, streamed
from ltx2rt.session.beside import LoraAdapters, WithAdapters, beside
from ltx2rt.session.call import Call, WeightsKey, holds, network_of
from ltx2rt.session.options import DistilledWeights, LoraSpec, ModelOptions, PlannedLora
from ltx2rt.system import identity
from ltx2rt.weights.audit import audit
from ltx2rt.weights.checkpoint import Checkpoint
from ltx2rt.weights.files import check_opened, stored_fields, unchanged
from ltx2rt.weights.lora.file import Lora, Merge, MergedSource, check_lora, open_lora
from ltx2rt.weights.quant.packed import Packed

MAX_NAMED = 64  # sets of LoRAs
HOST_SHARE = 0.1  # share of the host's memory to leave free


@dataclass(frozen=True)
class Residence:
    """A run's way of keeping weights. offload: the text encoder leaves once the prompts are
    encoded; reload: of each network one set at a time. streams: by network, how many of its pieces
    are streamed; leave: sets that are freed behind a stage, by its name. keep_bytes: for what
    blocks compute once for all steps, as of `hoist`. road: of newly loaded streamed pieces."""

    streams: Mapping[str, int] = field(default_factory=dict)
    leave: Mapping[str, tuple[WeightsKey, ...]] = field(default_factory=dict)
    keep_bytes: int | None = None
    road: str = PINNED
    offload: bool = False
    reload: bool = False

    def number(self, key: WeightsKey) -> int:
        """Number of streamed pieces of the set."""
        return self.streams.get(network_of(key), 0)

    def streamed(self, key: WeightsKey, graph: Graph) -> frozenset[Piece]:
        number = self.number(key)
        return streamed(pieces(graph), number) if number else frozenset()


@dataclass(frozen=True)
class RetainedWeights:
    """A set on the device and the graph it was loaded for. shares: another set had some."""

    weights: Mapping[str, Any]
    graph: Graph
    shares: bool
    streamed: frozenset[Piece] = frozenset()

    def tensors(self) -> dict[int, int]:
        """Bytes on one device by identity of the tensor; sets share tensors, not copies."""
        found = {}
        if self.streamed:
            sizes = pieces(self.graph)
            found[id(self)] = slots_bytes([sizes[piece] for piece in self.streamed])
        for name, (value, count) in self.graph.all_params().items():
            layers = 1
            names = [numbered(name, i) for i in range(count)]
            if name in self.weights:  # stacked over layers
                names, layers = [name], count
            for tensor in map(self.weights.__getitem__, names):
                if not getattr(tensor, "streamed", False):
                    found[id(tensor)] = value.type.nbytes * layers
        return found


class Counted:
    """A tensor source that counts the bytes that it hands out."""

    def __init__(self, source: Any):
        self.source, self.bytes = source, 0
        self.names, self.info = source.names, source.info

    def read(self, name: str, *cuts: Any) -> Any:
        tensor = self.source.read(name, *cuts)
        self.bytes += tensor.nbytes
        return tensor

    def stored(self, format: str, name: str, *cuts: Any) -> Any:
        kept = stored_fields(self.source, format, name, *cuts)
        self.bytes += kept[0].nbytes if kept else 0
        return kept


class WeightStore:
    """loading: entered around loads, given the network's name. loaded_bytes: read so far, also
    merged ones. again: whether every set will be loaded again (after a warm-up)."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend, options: ModelOptions, dtype: str):
        self.checkpoint, self.backend, self.options = checkpoint, backend, options
        self.dtype = dtype
        self.loading: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.loaded_bytes = 0
        self.again = False
        self.residence = Residence()
        # least recently used first
        self.held: OrderedDict[WeightsKey, RetainedWeights] = OrderedDict()
        self.parked: dict[WeightsKey, Any] = {}  # in the host's memory
        self._parked_as: dict[WeightsKey, frozenset[Piece]] = {}  # what of each was streamed
        self.roads: dict[WeightsKey, str] = {}  # how sets reach the device that were streamed
        self._stored: dict[tuple[str, ...], dict[str, str]] = {}
        self._named: dict[tuple[Any, ...], set[str]] = {}  # tensors that sets of LoRAs change
        self._adapters: dict[tuple[Any, ...], Adapters] = {}
        self._loads = 0
        # number of loads, the one before and the last
        self._loaded_at: dict[WeightsKey, tuple[int, int]] = {}
        self._parks = True  # until the backend cannot

    def adopt(self, planned: WeightStore) -> None:
        """Share what is known of the files with a store of the same checkpoint and options."""
        self._stored, self._named = planned._stored, planned._named
        self._adapters = planned._adapters

    def source(self, call: Call, loras: Sequence[LoraSpec] = ()) -> Any:
        """The tensor source of a call's network; LoRAs are merged on reading, or stay apart."""
        first, *more = call.row.parts
        source = self.checkpoint.source(first)
        if _on_distilled(call.loras):
            assert self.checkpoint.distilled, "the set is of another checkpoint"
            source = self.checkpoint.distilled
        for part in more:
            added = self.checkpoint.source(part)
            source = source.joined(added, added.names())
        if merged := _merged(loras):
            source = MergedSource(
                source,
                self._opened(merged),
                self.dtype,
                self.backend.merge,
                self.options.lora_allow_partial,
            )
        return source

    def _opened(self, loras: Sequence[LoraSpec]) -> list[Lora]:
        """Raises InputError for a file that has changed, and a LoRA of another release."""
        opened = [open_lora(lora.path, lora.strength) for lora in loras]
        for spec, lora in zip(loras, opened, strict=True):
            if isinstance(spec, PlannedLora) and spec.file != lora.file.identity:
                raise InputError(
                    f"{spec.path}: another file than when the run was planned; start it again"
                )
            check_lora(lora, self.checkpoint.config.version, self.options.lora_allow_partial)
        return opened

    def beside(self, call: Call) -> LoraAdapters:
        """The call's LoRAs that stay apart. Raises InputError where they cannot."""
        source, opened = self.source(call), self._opened(_apart(call.loras))
        blocks = self.checkpoint.config.transformer.num_layers
        found = beside(source, opened, self.dtype, blocks, self.options.lora_allow_partial)
        self._adapters[call.row.parts, _apart(call.loras)] = found.adapters
        return found

    def adapters(self, call: Call) -> Adapters | None:
        """Adapters of the call's graph; None without any. Raises as `beside` does."""
        key = call.row.parts, _apart(call.loras)
        if key[1] and key not in self._adapters:
            self.beside(call)
        return self._adapters.get(key)

    def stored(self, call: Call) -> Mapping[str, str]:
        """Encodings by tensor of the matrices that the call's set keeps on the device as they are
        stored: none where the weights' dtype is asked for."""
        return {} if self.options.weights_dtype == "bfloat16" else self.packed(call)

    def packed(self, call: Call) -> Mapping[str, str]:
        """Encodings by tensor of matrices in few bits that no LoRA of the call changes."""
        parts = *call.row.parts, *(str(lora.path) for lora in _on_distilled(call.loras))
        if parts not in self._stored:
            source = self.source(call)
            infos = ((name, source.info(name)) for name in source.names())
            packed = {n: x.encoding for n, x in infos if isinstance(x, Packed) and x.encoding}
            self._stored[parts] = packed
        found = self._stored[parts]
        touched = self._touched(call, call.loras) if found else set()
        return {name: encoding for name, encoding in found.items() if name not in touched}

    def audit(self, call: Call, graph: Graph) -> list[Merge]:
        """Compare the graph's parameters with the checkpoint, and the LoRAs' keys with both.
        Headers only. Returns what every LoRA of the call will merge into the tensors that the graph
        reads. Raises InputError."""
        source = self.source(call)
        weights = {name: spec for name, spec in graph.parameters().items() if MARK not in name}
        audit(weights, source, source.where, bool(call.row.partial(call.sizes)))
        loras = [lora for lora in call.loras if not isinstance(lora, DistilledWeights)]
        if not loras:
            return []
        opened, partial = self._opened(loras), self.options.lora_allow_partial
        merged = MergedSource(source, opened, self.dtype, allow_partial=partial)
        apart = [lora in _apart(loras) for lora in loras]
        merges = zip(merged.merges_into(weights), apart, strict=True)
        return [replace(merge, beside=beside) for merge, beside in merges]

    def _touched(self, call: Call, loras: Sequence[LoraSpec]) -> set[str]:
        """Names of the tensors that merging these LoRAs changes."""
        key = call.row.parts, tuple(merged := _merged(loras))
        if key not in self._named:
            if len(self._named) >= MAX_NAMED:
                self._named.clear()
            self._named[key] = self.source(call, loras).touched() if merged else set()
        return self._named[key]

    def of(self, call: Call, graph: Graph) -> Any:
        """The call's weights on the device, loaded on first use."""
        key = call.weights
        if key in self.held and self.held[key].streamed != self.residence.streamed(key, graph):
            del self.held[key]  # it was loaded for a run that needed more room, or less
            self.backend.trim()
        if key not in self.held:
            with self.loading(call.network):
                self.held[key] = self._loaded(call, graph)
            self._loads += 1
            self._loaded_at[key] = (self._loaded_at.get(key, (0, 0))[1], self._loads)
        self.held.move_to_end(key)
        return self.held[key].weights

    def has(self, key: WeightsKey, graph: Graph) -> bool:
        """Whether the set is here as the run keeps it, on the device or in the host's memory."""
        kept = self.held[key].streamed if key in self.held else self._parked_as.get(key)
        here = key in self.held or key in self.parked
        return here and kept == self.residence.streamed(key, graph)

    def _loaded(self, call: Call, graph: Graph) -> RetainedWeights:
        key, base, changed, left = call.weights, None, frozenset(), {}
        siblings = [other for other in self.held if network_of(other) == network_of(key)]
        streamed = self.residence.streamed(key, graph)
        if key in self.parked and self._parked_as[key] != streamed:
            del self.parked[key]
        kept = self.parked.get(key)
        if streamed and kept is None and self.residence.road != FILE:
            sizes = pieces(graph)
            oldest = sorted(self.parked, key=lambda key: self._loaded_at[key][1])
            self._make_host_room(self.everywhere(sum(sizes[p] for p in streamed)), oldest)
        if self.residence.reload:
            if kept and siblings:
                self._park(siblings[0])
                left = dict(self.held.pop(siblings.pop(0)).weights)  # its memory is taken over
            self.free(*siblings)
        elif siblings := [] if streamed else [o for o in siblings if self.comparable(o, key)]:
            near = min(siblings, key=lambda other: len(self.changed(call, other[1])))
            base, changed = self.held[near].weights, self.changed(call, near[1])
        if kept and base is None:
            return RetainedWeights(self.backend.unpark(kept, left), graph, False, streamed)
        source = self.source(call, call.loras)
        if _apart(call.loras):
            source = WithAdapters(source, self.beside(call))
        source = Counted(source)
        more: dict[str, Any] = {}  # a backend that does not stream is never asked to
        if streamed:
            more = {"streamed": streamed, "road": self.residence.road}
            self.roads[key] = self.residence.road
        sound = unchanged()  # others belong to a session that has ended
        weights = self.backend.load([graph], source, base, changed, **more)
        check_opened(sound)
        self.loaded_bytes += source.bytes
        return RetainedWeights(weights, graph, base is not None, streamed)

    def everywhere(self, size: int) -> int:
        """Bytes in this host's memory of what takes `size` on each device."""
        return size * prod(self.backend.mesh.values()) // self.backend.device().hosts

    def _make_host_room(self, size: int, stale: list[WeightsKey]) -> bool:
        """Drop `stale` parked sets, in their order, until `size` bytes fit. Returns whether they do."""
        while not (fits := has_room(self.backend.device_kind, size)) and stale:
            del self.parked[stale.pop(0)]
            self.backend.trim()
        return fits

    def changed(self, call: Call, theirs: tuple[LoraSpec, ...]) -> frozenset[str]:
        """Return the names of tensors that differ between the call's LoRAs and `theirs`: tensors
        that merged LoRAs touch after their common beginning, and parameters of LoRAs kept apart."""
        ours, same = _merged(call.loras), 0
        apart: Iterable[str] = ()
        if _apart(call.loras) != _apart(theirs) and (adapters := self.adapters(call)):
            apart = tensors(adapters.targets, self.checkpoint.config.transformer.num_layers)
        theirs = _merged(theirs)
        while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
            same += 1
        rests = [rest for rest in (ours[same:], theirs[same:]) if rest]
        return frozenset(apart).union(*(self._touched(call, rest) for rest in rests))

    def comparable(self, theirs: WeightsKey, ours: WeightsKey) -> bool:
        """Whether a set can share tensors with another; the merged files must be there."""
        planned = (lora for lora in theirs[1] if isinstance(lora, PlannedLora))
        try:
            same = all(identity(lora.path) == lora.file for lora in planned)
        except OSError:
            return False
        is_streamed = theirs in self.held and self.held[theirs].streamed
        same = same and _on_distilled(theirs[1]) == _on_distilled(ours[1])
        return same and holds(theirs, ours) and not (is_streamed or self.residence.number(theirs))

    def free(self, *keys: WeightsKey) -> None:
        """Give the memory of sets back; a later use loads or fetches them again."""
        here = [key for key in keys if key in self.held]
        for key in here:
            self._park(key)
            del self.held[key]
        if here:
            self.backend.trim()

    def close(self) -> None:
        """Drop everything."""
        self.held.clear()
        self.parked.clear()
        self.backend.trim()

    def _park(self, key: WeightsKey) -> None:
        """Copy a set that will be needed again into the host's memory, if there is room. Sets that
        were not loaded since this one's load before the last give way, so that sets which requests
        load alternately do not displace each other."""
        held, (before, _) = self.held[key], self._loaded_at.get(key, (0, 0))
        if key in self.parked or held.shares or not (self._parks and (self.again or before)):
            return
        stale = [other for other in self.parked if self._loaded_at[other][1] < before]
        size = self.everywhere(sum(held.tensors().values()))
        if not self._make_host_room(size, stale):
            return
        kept = self.backend.park(held.weights)
        self._parks = kept is not None
        if kept is not None:
            self.parked[key], self._parked_as[key] = kept, held.streamed
            if self.backend.is_main:
                note(
                    f"the host keeps the weights of {key[0]} in its memory, {size / 1e9:.3g} "
                    "GB, for the next request"
                )

    @property
    def held_bytes(self) -> int:
        """On one device, what sets share counted once."""
        tensors: dict[int, int] = {}
        for held in self.held.values():
            tensors |= held.tensors()
        return sum(tensors.values())


def _apart(loras: Sequence[LoraSpec]) -> tuple[LoraSpec, ...]:
    """LoRAs that stay apart from the weights."""
    return tuple(lora for lora in loras if isinstance(lora, PlannedLora) and lora.beside)


def _merged(loras: Sequence[LoraSpec]) -> tuple[LoraSpec, ...]:
    other = (*_apart(loras), *_on_distilled(loras))
    return tuple(lora for lora in loras if lora not in other)


def _on_distilled(loras: Sequence[LoraSpec]) -> tuple[LoraSpec, ...]:
    """Return the mark of the distilled transformer, if the set is merged into it."""
    return tuple(lora for lora in loras if isinstance(lora, DistilledWeights))


def has_room(device_kind: str, size: int) -> bool:
    """Return whether the host's memory has room for `size` bytes that leave such a device, with
    some left for everything else. On a CPU they would not leave it."""
    total, free = host_memory()
    return device_kind != "cpu" and size <= free - HOST_SHARE * total
