"""A GPU of NVIDIA: streams, steps recorded as CUDA graphs, memory, NCCL, attention."""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ltx2rt.backend import DeviceInfo
from ltx2rt.errors import InputError
from ltx2rt.ranks.environment import number
from ltx2rt_cuda.device.attention import gpu_attention, gpu_part, refuse
from ltx2rt_cuda.device.torch_device import Recorder, TorchDevice
from ltx2rt_cuda.devices import RESERVE

# runs before a step is recorded: libraries pick kernels and take workspaces in the first
WARMUPS = 2


class Cuda(TorchDevice):
    """The current GPU."""

    kind = "cuda"
    group = "nccl"
    exchanges = True
    queues = True
    pins = True
    channels_last = True
    pads_rows = True

    def is_here(self) -> bool:
        return torch.cuda.is_available() and not torch.version.hip

    def open(self) -> None:
        # float32 means float32: TF32 keeps 10 mantissa bits.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    stream = staticmethod(torch.cuda.Stream)
    current_stream = staticmethod(torch.cuda.current_stream)
    on = staticmethod(torch.cuda.stream)
    event = staticmethod(torch.cuda.Event)
    synchronize = staticmethod(torch.cuda.synchronize)
    # reserved bytes: the memory of recorded steps is not in `allocated`
    peak_bytes = staticmethod(torch.cuda.max_memory_reserved)
    attention = staticmethod(gpu_attention)
    part = staticmethod(gpu_part)

    def recorder(self) -> Pool:
        return Pool()

    def trim(self) -> None:
        torch.cuda.empty_cache()
        # torch 2.11 lacks the first
        (getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache)()

    def limit(self, max_memory: float | None) -> None:
        """Free the allocator's cache before it takes more. CUDA's context is not counted."""
        _, total = torch.cuda.mem_get_info()
        share = min(1.0, 1e9 * (max_memory or math.inf) / total)
        torch.cuda.set_per_process_memory_fraction(share)

    def attend_by(self, name: str, dtype: str) -> None:
        refuse(name, dtype, torch.cuda.get_device_capability())
        self.attention = partial(gpu_attention, by=name)

    def info(self, recorder: Recorder | None) -> DeviceInfo:
        free, total = torch.cuda.mem_get_info()
        unused_bytes, recorded_bytes = (
            (recorder.unused_bytes, recorder.nbytes) if recorder else (0, 0)
        )
        # given back where it is wanted
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - unused_bytes
        return DeviceInfo(
            kind="cuda",
            name=torch.cuda.get_device_name(),
            total_bytes=total,
            free_bytes=free + cached,
            count=torch.cuda.device_count(),
            recorded_bytes=recorded_bytes,
            **RESERVE,
        )

    def take(self, mesh: str) -> torch.device:
        local = number(os.environ, "LOCAL_RANK", 0, default="0")
        if local >= (found := torch.cuda.device_count()):
            raise InputError(
                f"mesh {mesh} needs a GPU for each process of a host, {found} were found"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        return device

    def group_options(self, group: str) -> Any:
        """NCCL's kernels enter before waiting waves of a product: both halves of a step wait."""
        if group != "nccl":
            return None
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        return options

    def begin(self, group: Any) -> None:
        """NCCL takes its buffers at the first collective: before anybody asks for free memory."""
        if dist.get_backend() == self.group:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)


@cache
def _streams() -> tuple[torch.cuda.Stream, ...]:
    """The two of every pool, `start` and `stream`; torch has 32, and hands them out in turn."""
    return torch.cuda.Stream(), torch.cuda.Stream()


class Pool:
    """The memory that recorded steps share, because only one of them runs at a time, and the
    streams that they are recorded on, because the allocator gives a stream no blocks of another.

    Recordings begin on a separate stream on which nothing runs: with a graph torch gives up
    cuBLAS's workspace of the stream on which it began, which all other graphs recorded there still
    write to (pytorch#193402). The workspace of `stream` was taken in the runs before the first
    recording, and stays.
    """

    def __init__(self):
        self.start, self.stream = _streams()
        self.serves: object = None
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        # the last registered runs first: before the process groups are destroyed
        atexit.register(self.release)
        self._open()

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Any, tuple[Tensor, ...]]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(WARMUPS):
                run()
        # The memory of these runs is free, but only this stream can reuse it. While a step is
        # recorded torch frees nothing, and would find the device full.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with self.recording(graph):
            outputs = run()
        return graph, outputs

    def _open(self) -> None:
        self.id, self.kept = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        # Without its last graph torch refuses a pool as long as anything is left in it.
        with self.recording(self.kept):
            torch.zeros((), device="cuda")  # torch warns about an empty graph

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """thread_local: other threads may use the device meanwhile, as NCCL's watchdog does."""
        self.graphs.add(graph)
        recorded = torch.cuda.graph(
            graph, pool=self.id, stream=self.start, capture_error_mode="thread_local"
        )
        # which itself does not go back if it fails
        with torch.cuda.stream(torch.cuda.current_stream()), recorded:
            self.stream.wait_stream(self.start)
            try:
                with torch.cuda.stream(self.stream):
                    yield
            finally:
                self.start.wait_stream(self.stream)

    @property
    def nbytes(self) -> int:
        """Bytes reserved for recorded steps, used or not."""
        return sum(s["total_size"] for s in self._segments())

    @property
    def unused_bytes(self) -> int:
        """Bytes of these segments that no tensor uses; only recorded steps can take them."""
        return sum(s["total_size"] - s["allocated_size"] for s in self._segments())

    def _segments(self) -> list[dict[str, Any]]:
        return [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == self.id]

    def release(self) -> None:
        """Drop the graphs: destroying a communicator would wait for recorded collectives."""
        for graph in self.graphs:
            graph.reset()

    def empty(self) -> None:
        self.release()
        self.graphs.clear()
        self._open()
