"""Weights that stay in the host's memory and come to the device layer by layer, while others are
computed with.

    copy stream   | piece 1 -> slot 1 | piece 2 -> slot 0 |
    main stream   | block 0 in slot 0 | block 1 in slot 1 | block 2 in slot 0 |

The copy into a slot waits for the block that last read it, the block waits for its copy; both by
events, so that the host waits for neither. A device without a queue makes the copies in order.
Under autograd the layers come once more, from the last to the first, for the backward pass.

So it is with pinned memory. A thread brings in parts weights that the device cannot read by itself:

    thread        | memory or file -> buffer 0 | -> buffer 1 | -> buffer 2 | -> buffer 0 |
    copy stream                                | 0 -> slot   | 1 -> slot   | 2 -> slot   |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from ltx2rt.notes import note
from ltx2rt.placement.stream import FILE, PINNED, SLOTS, STAGED, Piece
from ltx2rt_cuda.device.torch_device import DeviceEvent, DeviceStream, TorchDevice
from ltx2rt_cuda.host import FileWeight, Slabs, SpillFile, layout, pins_no_more

BUFFERS, BUFFER_BYTES = 3, 2**26  # pinned memory that the thread fills


class HostTensor:
    """One weight of a piece, in the host's memory; `Ring.brought` gives it on the device."""

    streamed = True  # it takes no memory of the device

    def __init__(self, ring: Ring, piece: Piece, name: str):
        self.ring, self.piece, self.name = ring, piece, name


class Ring:
    """The pieces of one set of weights, and the slots on the device that they take turns in."""

    def __init__(self, device: TorchDevice, road: str = PINNED, size: int = 0):
        """road: one of `placement.stream.ROADS`; size: bytes of all pieces."""
        self.device, self.road, self.size = device, road, size
        self.pieces: dict[Piece, dict[str, Tensor | FileWeight]] = {}
        self.copied_bytes = 0
        self._slabs = Slabs(device.pins and road == PINNED)
        self._spilled: SpillFile | None = None
        self._staged: set[Piece] = set()
        self._buffers: Buffers | None = None
        self._stream: DeviceStream | None = None
        self._slots: list[dict[str, Tensor]] = []
        self._holds: list[Piece | None] = []
        self._latest = 0  # place of the piece that was asked for last
        self._arrived: list[DeviceEvent] = []  # behind the copies into each slot
        self._read: list[DeviceEvent] = []  # behind the blocks that read each slot last

    def add(
        self, piece: Piece, tensors: Mapping[str, Tensor | FileWeight]
    ) -> dict[str, HostTensor]:
        """Keep a piece of the device in the host's memory or on its disk. Raises InputError."""
        self.pieces[piece] = {name: self._kept(x) for name, x in tensors.items()}
        if self.road != PINNED:
            self._staged.add(piece)
        return {name: HostTensor(self, piece, name) for name in tensors}

    def _kept(self, x: Tensor | FileWeight) -> Tensor | FileWeight:
        if isinstance(x, FileWeight):
            return x
        if self.road == FILE:
            self._spilled = self._spilled or SpillFile(self.size)
            return self._spilled.kept(x)
        try:
            return self._slabs.like(x).copy_(x)
        except RuntimeError as error:
            if not pins_no_more(error, self._slabs.pinned):
                raise
            note(
                "the system pins no more host memory: the rest of the streamed weights is staged, "
                "copied twice on its way to the device"
            )
            self.road, self._slabs = STAGED, Slabs(False)
            return self._slabs.like(x).copy_(x)

    @property
    def nbytes(self) -> int:
        """Device memory of the slots, whether they are there now or will be at the next use."""
        sizes = [sum(x.nbytes for x in piece.values()) for piece in self.pieces.values()]
        return max(sizes, default=0) * min(SLOTS, len(sizes))

    def brought(self, weights: Sequence[Tensor | HostTensor]) -> list[Tensor]:
        """The weights that one iteration reads, on the device. Call `used` behind the iteration."""
        (piece,) = {x.piece for x in weights if isinstance(x, HostTensor)}
        if torch.is_grad_enabled():
            # The backward pass of the block before this one has read its slot since `used`.
            for held, read in zip(self._holds, self._read, strict=True):
                if held != piece:
                    read.record()
        slot = self._slot(piece)
        self._settle()
        self.device.current_stream().wait_event(self._arrived[slot])
        places = self._slots[slot]
        return [places[x.name] if isinstance(x, HostTensor) else x for x in weights]

    def used(self, piece: Piece) -> None:
        """The iteration that reads the piece has been begun: bring the next one."""
        slot = self._holds.index(piece)
        self._read[slot].record()
        following = self._following(piece)
        if following not in self._holds:
            self._copy(following, (slot + 1) % len(self._slots))

    def _following(self, piece: Piece) -> Piece:
        """The next piece of a loop; under autograd first all in order, then back."""
        order = list(self.pieces)
        at, last = order.index(piece), len(order) - 1
        before, self._latest = self._latest, at
        if not torch.is_grad_enabled() or not last:
            return order[(at + 1) % len(order)]
        back = at == last or 0 < at < before
        return order[at - 1 if back else at + 1]

    def release(self) -> None:
        """Free the slots' memory; the next use allocates it again."""
        if self._buffers is not None:
            self._buffers.close()  # a file that cannot be read is of no more interest
            self._buffers = None
        if self._slots:
            self.device.synchronize()
        self._slots, self._holds, self._arrived, self._read = [], [], [], []

    def _slot(self, piece: Piece) -> int:
        if not self._slots:
            self._open()
        if piece not in self._holds:  # the first one, or one out of order
            order = list(self.pieces)
            places = [order.index(held) if held else -1 for held in self._holds]
            self._copy(piece, places.index(min(places)))
        return self._holds.index(piece)

    def _open(self) -> None:
        slots = range(min(SLOTS, len(self.pieces)))
        self._slots = [{} for _ in slots]
        self._holds = [None for _ in slots]
        self._stream = self._stream or self.device.stream()
        self._arrived, self._read = ([self.device.event() for _ in slots] for _ in range(2))

    def _settle(self) -> None:
        """Wait for the thread's copies. Raises InputError if a file has changed."""
        if self._buffers is not None:
            try:
                self._buffers.settle()
            except BaseException:
                self._holds = [None] * len(self._holds)  # no slot is to be believed
                raise

    def _copy(self, piece: Piece, slot: int) -> None:
        self._settle()
        self._holds[slot] = piece
        assert self._stream is not None, "the slots are open"
        main = self.device.current_stream()
        if self._room(piece, slot):
            # Memory that is given back is the main stream's at once: nothing may still be copied
            # into it. And newly taken memory may still be read by queued work of the main stream.
            main.wait_event(self._arrived[slot])
            self._stream.wait_stream(main)
        self._stream.wait_event(self._read[slot])
        if piece in self._staged:
            self._buffers = self._buffers or Buffers(self.device, self._stream)
            pairs = [(self.pieces[piece][name], x) for name, x in self._slots[slot].items()]
            self._buffers.bring(pairs, self._arrived[slot])
            self.copied_bytes += sum(x.nbytes for _, x in pairs)
            return
        with self.device.on(self._stream):
            for name, place in self._slots[slot].items():
                kept = self.pieces[piece][name]
                assert isinstance(kept, Tensor), "weights in files are staged"
                place.copy_(kept, non_blocking=True)
                self.copied_bytes += place.nbytes
            self._arrived[slot].record()

    def _room(self, piece: Piece, slot: int) -> bool:
        """Make room for the piece in the slot; whether memory was taken or given back. Layers of
        one stack are laid out alike, and take the same."""
        tensors, places = self.pieces[piece], self._slots[slot]
        here, wanted = ({n: layout(x) for n, x in each.items()} for each in (places, tensors))
        if here == wanted:
            return False
        places.clear()
        for name, (dtype, *shape) in wanted.items():
            places[name] = torch.empty_strided(*shape, dtype=dtype, device=self.device.torch)
        return True


class Buffers:
    """Memory of the host that a device reads by itself, pinned if the system allows so much, and
    the thread that fills it with what comes from other memory or from files."""

    def __init__(self, device: TorchDevice, stream: DeviceStream):
        self.device, self.stream = device, stream
        shape, dtype = (BUFFERS, BUFFER_BYTES), torch.uint8
        with torch.inference_mode(False):  # every thread may write to them
            try:
                self.buffers = torch.empty(shape, dtype=dtype, pin_memory=device.pins)
            except RuntimeError as error:
                if not pins_no_more(error, device.pins):
                    raise
                self.buffers = torch.empty(shape, dtype=dtype)
        self._gone = [device.event() for _ in self.buffers]  # behind the copy out of each
        self._turn = 0
        self._thread = ThreadPoolExecutor(1, "streamed-weights")
        self._pending: Future[None] | None = None

    def bring(self, pairs: Pairs, arrived: DeviceEvent) -> None:
        """Begin to copy weights to their places on the device."""
        self._pending = self._thread.submit(self._bring, pairs, arrived)

    def settle(self) -> None:
        """Wait for the pending copy; raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the pending copy and ignore its error."""
        if self._pending is not None:
            wait([self._pending])
        self._thread.shutdown()

    def _bring(self, pairs: Pairs, arrived: DeviceEvent) -> None:
        """The places are kept until their bytes have arrived."""
        inference = any(place.is_inference() for _, place in pairs)
        with torch.inference_mode(inference), self.device.on(self.stream):
            for kept, _ in pairs:
                if isinstance(kept, FileWeight):
                    kept.read_ahead()
            for kept, place in pairs:
                target = place.detach().flatten().view(torch.uint8)
                for first in range(0, len(target), BUFFER_BYTES):
                    part = target[first : first + BUFFER_BYTES]
                    number = self._turn = (self._turn + 1) % BUFFERS
                    self._gone[number].synchronize()
                    buffer = self.buffers[number][: len(part)]
                    if isinstance(kept, FileWeight):
                        kept.read_into(buffer, first)
                    else:
                        whole = kept.flatten().view(torch.uint8)
                        buffer.copy_(whole[first : first + BUFFER_BYTES])
                    part.copy_(buffer, non_blocking=True)
                    self._gone[number].record()
            arrived.record()
            arrived.synchronize()


Pairs = Sequence[tuple[Tensor | FileWeight, Tensor]]  # weights in the host's memory, their places


class StreamedWeights(dict):
    """Weights by name, of which some are `HostTensor`s of the ring."""

    def __init__(self, weights: Mapping[str, Any], ring: Ring):
        super().__init__(weights)
        self.ring = ring


def like(weights: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """`found`, with the ring that `weights` are streamed by, if any."""
    return StreamedWeights(found, weights.ring) if isinstance(weights, StreamedWeights) else found


def is_streamed(arguments: Iterable[Any]) -> bool:
    """Whether a program's arguments hold a weight that is streamed."""
    lists = (argument for argument in arguments if isinstance(argument, list))
    return any(isinstance(x, HostTensor) for argument in lists for x in argument)
