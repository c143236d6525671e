"""Launches and bytes of a recorded denoise step, and of the text encoder, on a GPU, counted without
one.

Decides what counts. The lowered step runs on torch's fake tensors on a CUDA device: shapes, strides
and dtypes without data, so that every choice that the runtime makes (kernel or plain ops, copies
for alignment, layouts) is made here. A launch is what the device executes; bytes are those that
operands and results occupy, each read or written once, without matrix products, attention and the
traffic between devices. A repeat's block runs once and counts as often as it is repeated. What
cuBLAS or cuDNN launch inside is theirs: a product, an attention and a collective are one launch
each.

On a mesh it also follows when an exchange leaves and when its result is read, at the rates and with
the assumed latency of `plan`: a step waits for the exchanges that no work hides. That NCCL takes
multiprocessors from that work is left out.

It also checks properties that a CPU does not show otherwise: nothing waits for the device, no
operand lies elsewhere, rows of 16 bytes where kernels and products load so.

    python -m benchmarks.launches --output benchmarks/results/launches.json
    python -m benchmarks.launches --mesh tensor=4 --weights-dtype float8

Without --mesh and --weights-dtype it counts all of CASES, the figures of the tests.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

# what collectives make of fake tensors is registered here
import torch.distributed._functional_collectives
import torch.nn.functional as F
from ltx2rt_cuda import lower
from ltx2rt_cuda.device import DEVICES, attention
from ltx2rt_cuda.distributed import Position
from ltx2rt_cuda.factory import FACTORY
from ltx2rt_cuda.ops import WITH_KERNEL, products
from ltx2rt_cuda.ops.table import DTYPES
from ltx2rt_kernels.choose import folder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels import request_graphs
from benchmarks.measure import machine, record
from ltx2rt.graph.ir import Graph
from ltx2rt.placement.cost import RECEIVED
from ltx2rt.placement.devices import DeviceKind, device_kind
from ltx2rt.session.options import parse_mesh

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_addmm_activation", "_scaled_mm"}
SUMMED = {"addmm", "baddbmm", "_addmm_activation"}  # products that add their first operand
FREE = {
    "_unsafe_view",
    "wait_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"}
LOAD_BYTES = attention.LOAD_BYTES
STAGES = ("stage1", "stage2")
H200 = device_kind("h200-141gb")
CASES = (  # mesh and dtype of the blocks' weights
    ("", None), ("", "float8"), ("tensor=2", None), ("tensor=4", None), ("tensor=8", None),
    ("guidance=4", None),
)  # fmt: skip


@dataclass
class Counts:
    """launches, bytes and flops by the launched thing: an aten op, a kernel, "product",
    "attention", "collective".

    On a mesh, when the stream and the link of one device of `kind` have done it all: a
    launch takes the time of its FLOP or its bytes, an exchange leaves when the one before it has
    arrived, and the stream waits where it is read.
    """

    kind: DeviceKind
    mesh: Mapping[str, int]
    launches: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    times: int = 1
    stream_s: float = 0.0
    link_s: float = 0.0
    waited_s: float = 0.0
    arrivals: dict[int, float] = field(default_factory=dict)

    def add(self, name: str, *tensors: Any, flops: int = 0) -> None:
        nbytes = sum(occupied(x) for x in tensors)
        self.launches[name] += self.times
        self.bytes[name] += self.times * nbytes
        self.flops[name] += self.times * flops
        self.stream_s += nbytes / self.kind.memory_bytes_per_s + flops / self.kind.flops_per_s

    def leave(self, name: str, axis: str, sent: Sequence[torch.Tensor], results: Any) -> None:
        """An exchange over a mesh axis, named as torch does."""
        self.launches["collective"] += self.times
        op, devices = next(op for op in RECEIVED if name.startswith(op)), self.mesh[axis]
        received = sum(map(occupied, sent)) * RECEIVED[op](devices)
        self.link_s = max(self.link_s, self.stream_s) + self.kind.exchange_s(
            op, devices, 1, round(received)
        )
        for x in results if isinstance(results, (list, tuple)) else [results]:
            self.arrivals[x.untyped_storage()._cdata] = self.link_s

    def wait(self, x: torch.Tensor) -> None:
        missing_s = max(0.0, self.arrivals.pop(x.untyped_storage()._cdata, 0.0) - self.stream_s)
        self.stream_s += missing_s
        self.waited_s += missing_s

    def repeated(self, before: tuple[float, float], count: int) -> None:
        """Count the time since `before` (`stream_s`, `waited_s`) `count` times."""
        stream_s, waited_s = before
        self.stream_s = stream_s + count * (self.stream_s - stream_s)
        self.waited_s = waited_s + count * (self.waited_s - waited_s)

    def time_s(self, kind: DeviceKind) -> float:
        """Time of one device without exchanges: products and attention at its full rate, then all
        other bytes at its memory's."""
        return self.flops.total() / kind.flops_per_s + self.bytes.total() / kind.memory_bytes_per_s

    def facts(self) -> dict[str, Any]:
        """Totals, and launches of each kind."""
        gb = round(self.bytes.total() / 1e9, 1)
        waits = (
            {"step_ms": round(1e3 * self.stream_s, 1), "waits_ms": round(1e3 * self.waited_s, 1)}
            if self.mesh
            else {}
        )
        return {
            "launches": self.launches.total(),
            "gb": gb,
            **waits,
            "by": dict(self.launches.most_common()),
        }


def occupied(x: Any) -> int:
    """Bytes that a tensor reads from memory once: of an axis of stride 0, one."""
    if isinstance(x, (list, tuple)):
        return sum(map(occupied, x))
    if not isinstance(x, torch.Tensor):
        return 0
    return (
        prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()
    )


def is_aligned(x: torch.Tensor) -> bool:
    """Whether x begins, and every axis but the last steps, at a multiple of LOAD_BYTES."""
    starts = (
        x.storage_offset(),
        *(s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1),
    )
    return x.stride(-1) == 1 and not any(n * x.element_size() % LOAD_BYTES for n in starts)


class Counting(TorchDispatchMode):
    """Counts what torch itself launches, and refuses what would wait for the device or leave it."""

    def __init__(self, counts: Counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in WAITS:
            raise RuntimeError(f"{func} waits for the device")
        if name == "wait_tensor":
            self.counts.wait(args[0])
        is_view = any(
            a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments
        )
        if is_view or name in FREE or func.namespace == "prim":
            return result
        tensors = [
            x
            for x in torch.utils._pytree.tree_leaves((args, kwargs, result))
            if isinstance(x, torch.Tensor)
        ]
        if elsewhere := {x.device.type for x in tensors if x.ndim} - {"cuda"}:
            raise RuntimeError(f"{func} reads or writes on {elsewhere}")
        if func.namespace == "_c10d_functional":
            if name in (
                "all_reduce",
                "all_reduce_coalesced",
            ):  # they copy their operands, and reduce the copies
                for x in tensors[: len(tensors) // 2]:
                    self.counts.add("copy for a collective", x, x)
            sent, *_, axis = args
            self.counts.leave(
                name, axis, sent if isinstance(sent, (list, tuple)) else [sent], result
            )
        elif name in PRODUCTS:
            matrices = [x for x in tensors if x.ndim == 2]
            if unaligned := [x for x in matrices if not is_aligned(x) and not is_aligned(x.t())]:
                raise RuntimeError(
                    f"{func}: rows that are no multiples of {LOAD_BYTES} bytes: {unaligned}"
                )
            inner = args[name in SUMMED].shape[-1]
            self.counts.add("product", flops=2 * result.numel() * inner)
        elif (
            name == "_scaled_dot_product_efficient_attention"
        ):  # where its denominator is also asked for
            q, k = tensors[:2]
            self.counts.add("attention", flops=4 * q.numel() * k.shape[2])
        else:
            self.counts.add(name, *tensors)
        return result


def contiguous(x: torch.Tensor, memory_format=torch.contiguous_format) -> torch.Tensor:
    return (
        x if x.is_contiguous(memory_format=memory_format) else x.clone(memory_format=memory_format)
    )


def indexed(x: torch.Tensor, index: Any) -> torch.Tensor:
    """x[index] of ints, slices and an ellipsis."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.ndim - len(index) + 1), *index[at + 1 :])
    dim = 0
    for i in index:
        if isinstance(i, int):
            x = x.select(dim, i)
        else:
            start, stop, step = i.indices(x.shape[dim])
            x, dim = torch.ops.aten.slice(x, dim, start, stop, step), dim + 1
    return x


class Views(TorchFunctionMode):
    """Functions of torch as on a machine with a driver, where without one it fails or does
    something else."""

    def __init__(self, counts: Counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.contiguous:
            return contiguous(*args, **kwargs)
        if func is torch.Tensor.reshape:
            x, *shape = args
            try:
                return x.view(*shape)
            except (RuntimeError, ValueError):  # torch itself, its fake tensors
                return contiguous(x).view(*shape)
        if func in (
            torch.rms_norm,
            F.rms_norm,
        ):  # on a CPU build torch writes its kernel out, in a dozen ops
            x = contiguous(args[0])
            y = torch.empty_like(x)
            self.counts.add("rms_norm", x, y)
            return y
        if func is torch.Tensor.__getitem__:
            return indexed(*args)
        return func(*args, **kwargs)


class Launches:
    """Stands for a Triton kernel; notes its launches."""

    def __init__(self, kernel: Any, counts: Counts):
        self.name, self.counts = kernel.fn.__name__, counts

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *operands, num_warps: int, **constants) -> None:
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        once = {
            (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()): x
            for x in tensors
        }
        self.counts.add(self.name, *once.values())


def once(counts: Counts, repeat: lower.RepeatModule, *operands):
    """The first iteration of a repeat, and one that counts as all others: it may wait for data
    from the one before."""
    plan = repeat.plan
    carry, invariant, per_layer = repeat.iterations(operands)
    results, times = (), counts.times
    for count in (1, plan.count - 1)[: plan.count]:
        before = counts.stream_s, counts.waited_s
        counts.times = times * count
        results = repeat.block(*carry, *invariant, *(p[0] for p in per_layer))
        counts.repeated(before, count)
        carry = results[: plan.num_carries]
    counts.times = times
    stacked = [x.expand(plan.count, *x.shape) for x in results[plan.num_carries :]]
    return *results[: plan.num_carries], *stacked


@contextmanager
def stood_in(counts: Counts) -> Iterator[None]:
    """On this machine the runtime chooses as on an H200, and what would reach the device is
    counted."""

    def attend(q, k, v, mask, scale):
        q, k, v = (attention.aligned(x) for x in (q, k, v))
        counts.add("attention", flops=4 * q.numel() * k.shape[1])
        return torch.empty_like(q.transpose(1, 2)).transpose(1, 2)

    def aligned(x):
        if is_aligned(x) or x.shape[-1] * x.element_size() % LOAD_BYTES:
            return x
        return x.clone(memory_format=torch.contiguous_format)

    with ExitStack() as stack:
        kernels = set(map(folder, WITH_KERNEL))
        for name in kernels - {"linear_gelu"}:
            module = import_module(f"ltx2rt_kernels.{name}.cuda")
            for name, kernel in vars(module).items():
                if name.endswith("_kernel"):
                    stack.enter_context(patch.object(module, name, Launches(kernel, counts)))
        for owner, name, stand_in in (
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (attention, "aligned", aligned),
            (DEVICES["cuda"], "attention", attend),
            (products, "tried_road", lambda device: "rows"),
            (lower.RepeatModule, "forward", lambda self, *operands: once(counts, self, *operands)),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def count(graph: Graph, steps: bool = True, whole: bool = False, kind: DeviceKind = H200) -> Counts:
    """Launches and bytes of one call of `graph`, as it is lowered for a GPU. steps: of a denoise
    step. whole: its tokens stay whole, as under --compile."""
    graph, counts = (
        FACTORY.as_run(graph, "cuda", steps=steps, compile=whole),
        Counts(kind, graph.mesh),
    )
    position = Position(
        graph.mesh, dict.fromkeys(graph.mesh, 0), {axis: axis for axis in graph.mesh}
    )

    def tensor(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="cuda")

    module = lower.lower(graph, torch.device("cpu"), position=position)
    with FakeTensorMode(), torch.no_grad(), stood_in(counts):
        for part in module.modules():
            if isinstance(part, lower.Constant):
                part.value = tensor(part.value.shape, part.value.dtype)
        inputs = [tensor(v.type.shape, DTYPES[v.type.dtype]) for v in graph.inputs.values()]
        weights, layouts = [], graph.all_layouts()
        for name, (v, layers) in graph.all_params().items():
            rows, *others = v.type.shape or (0,)
            packed = len(layouts[name].parts) > 1
            shape = (products.joined_rows(rows), *others) if packed else v.type.shape
            weight = tensor(shape, DTYPES[v.type.dtype])
            weights.append([weight] * layers if "*" in name else weight)
        with Counting(counts), Views(counts):
            module(*inputs, *weights)
    return counts


def step_graphs(
    preset: str,
    size: tuple[int, int, int, int],
    mesh: str,
    dtype: str | None,
    stages: Sequence[str] = STAGES,
) -> dict[str, Graph]:
    """A step of each stage; "text": the text encoder. size: width, height, frames, timesteps among
    the video tokens."""
    return request_graphs(preset, *size, dtype, parse_mesh(mesh) if mesh else {}, stages)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(
        description="launches and bytes of a recorded denoise step, counted without a GPU"
    )
    parser.add_argument("--preset", default="ltx-2.3")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--num-frames", type=int, default=121)
    parser.add_argument(
        "--levels", type=int, default=1, help="timesteps among the video tokens; an image adds one"
    )
    parser.add_argument("--mesh", metavar="AXIS=N")
    parser.add_argument("--weights-dtype", choices=("bfloat16", "float8"))
    parser.add_argument(
        "--whole", action="store_true", help="leave the tokens whole, as --compile does"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    args = parser.parse_args(argv)
    size = (args.width, args.height, args.num_frames, args.levels)
    asked = args.mesh or args.weights_dtype
    steps = []
    for mesh, dtype in [(args.mesh or "", args.weights_dtype)] if asked else CASES:
        stages = STAGES if mesh or dtype else ("text", *STAGES)
        for stage, graph in step_graphs(args.preset, size, mesh, dtype, stages).items():
            found = count(graph, stage != "text", args.whole)
            steps.append({"mesh": mesh, "weights_dtype": dtype, "stage": stage} | found.facts())
            print(
                f"{mesh or 'one GPU'} {dtype or ''} {stage}: {steps[-1]['launches']} launches, "
                f"{steps[-1]['gb']} GB, {found.flops.total() / 1e12:.1f} TFLOP, one after the "
                f"other at an H200's rates {found.time_s(H200):.3f} s"
                + (
                    f", with exchanges {found.stream_s:.3f} s, {found.waited_s:.3f} s of it waiting"
                    if mesh
                    else ""
                )
            )
            for name, n in found.launches.most_common():
                print(f"  {name:28} {n:>6} {found.bytes[name] / 1e9:>8.2f} GB")
    facts = {
        "benchmark": "launches",
        **machine(),
        "clip": size,
        "preset": args.preset,
        "steps": steps,
    }
    record(args.output, facts)
    return facts


if __name__ == "__main__":
    main()
