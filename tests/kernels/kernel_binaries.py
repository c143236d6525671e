"""Every kernel as it would be launched for LTX-2.3 at full size, compiled for sm_90 without a GPU.

Prints {launch: {"registers", "spilled_bytes", "loads", "narrow_loads"}}; argument: a pattern of the
launches' names (default: all of them). The operands are on torch's meta device.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import triton
from ltx2rt_cuda.ops.products import joined_rows
from ltx2rt_kernels.head_gate import cuda as head_gate
from ltx2rt_kernels.neighbourhood_attention import cuda as neighbourhood
from ltx2rt_kernels.norm_modulate import cuda as norm_modulate
from ltx2rt_kernels.pixel_norm_silu import cuda as pixel_norm_silu
from ltx2rt_kernels.qk_norm_rope import cuda as qk_norm_rope
from ltx2rt_kernels.quantise_rows import cuda as quantise_rows
from ltx2rt_kernels.residual_norm_modulate import cuda as residual_norm_modulate
from ltx2rt_kernels.snake_beta import cuda as snake_beta
from ltx2rt_kernels.unpack import cuda as unpack
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ltx2rt.graph.encodings import ENCODINGS

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32",
    torch.float8_e4m3fn: "*fp8e4nv", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip
# All, and those of 16 bits at a time, where eight numbers would come at once.
LOADS = {"loads": "", "narrow_loads": r"\.b16\b"}
TOKENS, F32, EPS = 6144, torch.float32, {"eps": 1e-6}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Recorder:
    """Stands for a kernel; its launch compiles instead of running. found: by the last launch."""

    found: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *operands, num_warps: int, **constants) -> None:
        names = self.kernel.arg_names
        values = dict(zip(names, operands, strict=False)) | constants
        signature, fixed, attrs = {}, {}, {}
        for i, name in enumerate(names):
            value = values[name]
            if name in constants or value is None or (isinstance(value, int) and value == 1):
                signature[name], fixed[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name], attrs[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
            elif isinstance(value, int):
                signature[name] = "i32"
                if value % 16 == 0:
                    attrs[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32"
        source = ASTSource(self.kernel, signature, fixed, attrs)
        asm = triton.compile(source, target=TARGET, options={"num_warps": num_warps}).asm
        patterns = {name: rf"ld\.global[.\w]*{end}" for name, end in LOADS.items()}
        loads = {name: len(re.findall(x, asm["ptx"])) for name, x in patterns.items()}
        Recorder.found = resources(asm["cubin"]) | loads


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread in a binary, and bytes that it spills to memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = (
        int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK", "LOCAL")
    )  # type: ignore[index]
    return {"registers": registers, "spilled_bytes": stack + local}


Launch = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # name, function, operands


def of_rows() -> Iterator[Launch]:
    for heads, dim in ((None, 3840), (16, 256)):
        packed = meta(2, 1024, 8192)[..., : (heads or 1) * dim]
        x = packed.unflatten(2, (heads, dim)) if heads else packed
        plan = {"views": ((*[1] * (x.ndim - 1), dim),)} | EPS
        yield f"norm_scale {dim}", norm_modulate.norm_scale, (x, meta(dim, dtype=F32)), plan
    residual = residual_norm_modulate.residual_norm_modulate
    for width in (4096, 2048):
        x, row, view = meta(4, TOKENS, width), meta(4, width), (4, 1, width)
        name, plan = f"residual_norm_modulate {width}", {"views": (view,) * 2}
        yield f"norm_modulate {width}", norm_modulate.norm_modulate, (x, row, row), plan | EPS
        yield f"modulate {width}", norm_modulate.modulate, (x, row, row), plan
        plan = {"views": ((1, 1, width), *[view] * 3), "biased": True} | EPS
        yield f"{name}, of a partial sum", residual, (x, x[:3], row[0], *[row] * 3), plan
        for pairs in (0, 1, 2):
            plan = {"views": (view,) * (1 + 2 * pairs)} | EPS
            yield f"{name}, {pairs} pairs", residual, (x, x, row, *[row] * 2 * pairs), plan
        plan |= {"quantised": (1, 2), "unread": (2,)}
        yield f"{name}, 2 pairs, quantised", residual, (x, x, *[row] * 5), plan
        plan, gated = {"views": (view,)}, residual_norm_modulate.gated_residual
        yield f"gated_residual {width}", gated, (x, x, row), plan
        levels, index = meta(4, 2, 9, width)[:, :, 4], meta(TOKENS, dtype=torch.int32)
        plan = {"views": ((4, 2, width),) * 5, "index_view": (1, TOKENS)} | EPS
        yield f"{name}, 2 pairs by level", residual, (x, x, *[levels] * 5, index), plan


def of_heads() -> Iterator[Launch]:
    rope, scale_rope = qk_norm_rope.qk_norm_rope, qk_norm_rope.qk_scale_rope
    for dim, heads in product((128, 64), (32, 4)):  # heads of one device and of eight
        width, name = heads * dim, f"{heads} heads of {dim}"
        count = {"count": 32 * dim}
        x = meta(4, TOKENS, joined_rows(3 * width + heads))[..., :width]
        x = x.unflatten(2, (heads, dim))
        table, others = (meta(TOKENS, heads, dim // 2, dtype=F32) for _ in range(2))
        views = (1, *table.shape)
        one, both = ({"weight_views": (None,) * n, "table_views": (views,) * n} for n in (1, 2))
        one, both = one | EPS, both | EPS
        weight, total = meta(width), meta(4, TOKENS, dtype=F32)
        q, given = (x, weight, table, table), (x, total, weight, table, table)
        yield f"qk_norm_rope {name}", rope, q, one
        yield f"qk_scale_rope {name}", scale_rope, given, one | count
        yield f"qk_norm_rope of q and k, {name}", rope, (*q, x, weight, others, others), both
        yield f"qk_norm_rope with the same tables, {name}", rope, (*q, *q), both
        yield f"qk_scale_rope of q and k, {name}", scale_rope, (*given, *given), both | count
        packed = meta(2, 1024, joined_rows(2 * width))
        text, v = (packed[..., n : n + width].unflatten(2, (heads, dim)) for n in (0, width))
        plan, norm = {"weight_views": (None,) * 2} | EPS, qk_norm_rope.qk_norm
        yield f"qk_norm {name}", norm, (x, weight, text, weight), plan
        spread = plan | {"spread": (0, 1, 0, 0)}
        yield f"qk_norm and spread {name}", norm, (x, weight, text, weight, v), spread
        sums = meta(2, 1024, dtype=F32)
        operands = x, total, weight, text, sums, weight
        yield f"qk_scale {name}", qk_norm_rope.qk_scale, operands, plan | count
        yield f"sum_squares {name}", qk_norm_rope.sum_squares, (x,), {"dims": (2, 3)}
        gate = meta(4, heads, TOKENS, dim).transpose(1, 2), meta(4, TOKENS, heads)
        yield f"head_gate {name}", head_gate.head_gate, gate, {}
        yield f"head_gate_rows {name}", head_gate.head_gate_rows, gate, {}
        choice = meta(4, dtype=F32), x
        yield f"head_gate of the values {name}", head_gate.head_gate, (*gate, *choice), {}


def of_others() -> Iterator[Launch]:
    for channels, lies in product((128, 1024), ("first", "last")):
        x = meta(1, channels, 16, 128, 192)
        x = x.to(memory_format=torch.channels_last_3d) if lies == "last" else x
        name, plan = f"pixel_norm_silu {channels} channels {lies}", {"dim": 1, "eps": 1e-8}
        yield name, pixel_norm_silu.pixel_norm_silu, (x,), plan
    taps, channel = meta(1, 1, 12, dtype=F32), meta(768, dtype=F32)
    operands = meta(1, 768, 30240, dtype=F32), taps, taps, channel, channel
    yield "snake_beta", snake_beta.snake_beta, operands, {"eps": 1e-9}
    rows = quantise_rows.quantise_rows
    for width in (2048, 4096, 16384):
        yield f"quantise_rows {width}", rows, (meta(4 * TOKENS, width),), {}
    yield "quantise_rows of a GELU", rows, (meta(4 * TOKENS, 16384),), {"gelu": True}
    encodings = "int8", "nvfp4", "stored float8", "int8 rotated by 4", "int8 rotated by 256"
    for encoding in (*encodings, *unpack.BLOCKS, "Q4_K or Q6_K"):
        fields = ENCODINGS[encoding].fields
        stored = [meta(16384, f.columns(4096), dtype=getattr(torch, f.dtype)) for f in fields]
        plan = {"encoding": encoding, "dtype": "bfloat16"}
        yield f"unpack {encoding}", unpack.unpack, (*stored,), plan
    large, small = ((121, 128, 192), 256, (11, 11, 11)), ((18, 16, 24), 2048, (3, 7, 7))
    for sizes, width, window in (large, small):
        packed = meta(1, *sizes, 3 * width).unflatten(4, (3, width // 64, 64))
        q = meta(*packed.shape[:4], *packed.shape[5:])
        operands = q, *(packed[:, :, :, :, i] for i in (1, 2))
        plan = {"window": window, "first": (0, 0, 0), "scale": 0.125}
        name, attend = "neighbourhood_attention", neighbourhood.neighbourhood_attention
        yield f"{name} {window[2]}", attend, operands, plan


def main() -> None:
    for module in (
        norm_modulate, qk_norm_rope, head_gate, pixel_norm_silu, snake_beta, quantise_rows,
        neighbourhood, unpack,
    ):  # fmt: skip
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, triton.runtime.JITFunction) and name.endswith("_kernel"):
                setattr(module, name, Recorder(kernel))
    found, wanted = {}, re.compile(sys.argv[1] if len(sys.argv) > 1 else "")
    for name, function, operands, plan in chain(of_rows(), of_heads(), of_others()):
        if wanted.match(name):
            function(*operands, **plan)
            found[name] = Recorder.found
    print(json.dumps(found))


if __name__ == "__main__":
    main()
