"""A device that PyTorch computes on; as it is, the processor of this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, device, dtype

from ltx2rt.backend import DeviceInfo
from ltx2rt.errors import InputError
from ltx2rt.placement.devices import host_memory
from ltx2rt_cuda.device.attention import cpu_part, torch_attention
from ltx2rt_cuda.host import give_back_freed, keep_freed


class DeviceEvent(Protocol):
    """A place in the work of a stream."""

    def record(self) -> None:
        """Be behind all that the current stream has to do."""
        ...

    def synchronize(self) -> None: ...


class DeviceStream(Protocol):
    """Work in its order."""

    def wait_stream(self, other: Any, /) -> None: ...
    def wait_event(self, event: Any, /) -> None: ...


class Done:
    """Stream and event of a device that runs every call at once."""

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class Recorder(Protocol):
    """Records functions, and holds the memory that their recordings share. id: changes once the
    recordings are no longer valid. serves: marks the call that wrote the memory's values."""

    id: Any
    serves: object

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Any, tuple[Tensor, ...]]:
        """A recording, to `replay` and in the end `reset`, and the tensors that a replay writes."""
        ...

    def empty(self) -> None:
        """Give up all recordings and their memory."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes reserved for recorded functions, used or not."""
        ...

    @property
    def unused_bytes(self) -> int:
        """Bytes of those that no tensor has."""
        ...


class TorchDevice:
    """A device of PyTorch, with all in which one kind differs from another. kind: torch's type of
    device, and the name in `--device`. group: the backend of torch.distributed, exchanges: whether
    those can be recorded. queues: a call returns before its work is done. pins: copies come fastest
    from pinned memory. channels_last: 3-D convolutions multiply in that layout. pads_rows: kernels
    want the rows of a packed weight to begin on a grid.
    """

    kind = "cpu"
    group = "gloo"
    exchanges = False
    queues = False
    pins = False
    channels_last = False
    pads_rows = False

    @property
    def torch(self) -> device:
        return device(self.kind)

    def is_here(self) -> bool:
        return True

    def open(self) -> None:
        """Settings of this process, before anything is computed."""
        keep_freed()

    def stream(self) -> DeviceStream:
        """A new stream."""
        return Done()

    def current_stream(self) -> DeviceStream:
        return Done()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within it, work goes to this stream."""
        return nullcontext()

    def event(self) -> DeviceEvent:
        return Done()

    def recorded_event(self) -> DeviceEvent:
        """An event behind all that the current stream has to do."""
        event = self.event()
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for all work."""

    def recorder(self) -> Recorder | None:
        """None: every call launches its work again."""
        return None

    def upload(self, x: Tensor, dtype: dtype) -> Tensor:
        """A tensor of any memory on the device."""
        if self.pins and not x.is_cuda:
            # From other memory a copy waits for all that the device has to do. One pass, by all
            # cores, also cuts a part out of a larger array and rounds it.
            x = torch.empty(x.shape, dtype=dtype, pin_memory=True).copy_(x)
        return x.to(self.torch, dtype, non_blocking=True)

    def fetch(self, x: Tensor) -> Tensor | Fetched:
        """Start copying a result to the host once it is computed, not after later work."""
        if not self.queues:
            return x
        x = widened(x)
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=self.pins)
        host.copy_(x, non_blocking=True)
        return Fetched(host, self.recorded_event())

    def trim(self) -> None:
        """Give back the memory that is free and kept for later."""
        give_back_freed()

    def limit(self, max_memory: float | None) -> None:
        """Keep allocated and cached memory within `max_memory` GB."""

    def attend_by(self, name: str, dtype: str) -> None:
        """Compute attention by this kernel from now on, as `Backend.attend_by`."""
        if name not in ("auto", "torch"):
            raise InputError(f"--attention {name}: it runs on a GPU, this is a CPU; leave it out")

    def info(self, recorder: Recorder | None) -> DeviceInfo:
        """recorder: of this process; the memory that it holds is not free."""
        give_back_freed()  # or it counts as taken
        total, free = host_memory()
        return DeviceInfo("cpu", "CPU", total, free)

    def peak_bytes(self) -> int | None:
        """Most bytes that were taken from the device at once; None: not known."""
        return None

    def take(self, mesh: str) -> device | None:
        """Use only this process' own device; returns the device that a process group needs.
        mesh: in words. Raises InputError if there is none."""
        return None

    def group_options(self, group: str) -> Any:
        """Options of a process group of the backend `group`."""
        return None

    def begin(self, group: Any) -> None:
        """The first use of a new process group."""

    # softmax(q k^T scale + mask) v: q (B, tokens, heads, head_dim), k, v (B, keys, ...)
    attention = staticmethod(torch_attention)
    part = staticmethod(cpu_part)  # the kernel of `attention_part`


HOST = TorchDevice()


@dataclass(frozen=True)
class Fetched:
    """A result on its way to the host, which waits for no work that was enqueued after it."""

    tensor: Tensor
    arrived: DeviceEvent

    def wait(self) -> Tensor:
        self.arrived.synchronize()
        return self.tensor


def widened(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x
