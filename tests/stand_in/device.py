"""The device of the stand-in, for programs that run on it: its counters, its memory, and results
of cuDNN, whose libraries are the shipped ones and cannot run.

python tests/stand_in/device.py MODULE ARG ...: run a module of the project, and print the counters.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import sys
from typing import Any

import torch
from torch.library import Library

import ltx2rt.placement.devices as devices

HOST_BYTES = 256 * 10**9  # of the host that the run believes in; what is copied there is not kept
devices.host_memory = lambda: (HOST_BYTES, HOST_BYTES)  # before others take it by name

from ltx2rt_cuda.ops import products  # noqa: E402

import ltx2rt.stages.stage as stage  # noqa: E402

stage.finite = lambda *_, **__: None  # what nothing computed may be anything
# Tried by their numbers, which are not there: by what is known of the cards instead.
ROADS = {(8, 0): "bfloat16", (8, 6): "bfloat16", (8, 9): "tensor", (12, 0): "tensor"}
products.tried_road = lambda _: ROADS.get(torch.cuda.get_device_capability(), "rows")

COUNTERS = (  # of runtime.c
    "launches", "nodes", "replays", "illegal", "unjoined", "collectives", "concurrent", "peak_bytes"
)  # fmt: skip
CONTEXT_BYTES = 500 * 2**20  # as in runtime.c
ATEN = torch.ops.aten
library = Library("aten", "IMPL")


def counter(name: str) -> ctypes.c_size_t:
    """A counter of runtime.c; its `value` may be set."""
    return ctypes.c_size_t.in_dll(ctypes.CDLL("libcudart.so.13"), f"stand_in_{name}")


def counts() -> dict[str, int]:
    """What the runtime has counted in this process."""
    return {name: counter(name).value for name in COUNTERS}


def _meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def convolution(
    x: torch.Tensor, weight: torch.Tensor, padding: Any, stride: Any, dilation: Any, groups: int,
    *_: Any, more: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Memory for the result, laid out as cuDNN's. more: the padding of a transposed one's result."""
    plan = stride, padding, dilation, more is not None, more or [0] * len(padding), groups
    made = ATEN.convolution(_meta(x), _meta(weight), None, *plan)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    either = last and any(y.is_contiguous(memory_format=last) for y in (x, weight))
    layout = last if either and last else torch.contiguous_format
    return torch.empty(made.shape, dtype=x.dtype, device=x.device, memory_format=layout)


def transposed(
    x: torch.Tensor, weight: torch.Tensor, padding: Any, output_padding: Any, *plan: Any
) -> torch.Tensor:
    return convolution(x, weight, padding, *plan, more=output_padding)


def attention(q: torch.Tensor, *rest: Any, **settings: Any) -> tuple[Any, ...]:
    found = ATEN._scaled_dot_product_cudnn_attention(_meta(q), *map(_meta, rest), **settings)

    def here(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=q.device)

    return tuple(here(x) if isinstance(x, torch.Tensor) else x for x in found)


library.impl("cudnn_convolution", convolution, "CUDA")
library.impl("cudnn_convolution_transpose", transposed, "CUDA")
library.impl("_scaled_dot_product_cudnn_attention", attention, "CUDA")


if __name__ == "__main__":
    module, sys.argv = sys.argv[1], sys.argv[1:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        print("stand-in:", json.dumps(counts() | {"rank": os.environ.get("RANK", "0")}), flush=True)
