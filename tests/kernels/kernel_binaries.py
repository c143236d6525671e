"""Every kernel as it would be launched for LTX-2.3 at full size, compiled for sm_90 without a GPU.

Prints {launch: {"registers", "spilled_bytes", "loads", "narrow_loads"}}; argument: a pattern of the
launches' names (default: all of them). The operands are on torch's meta device: shapes and strides,
no data.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
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


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Recorder:
    """Stands for a kernel; its launch compiles instead of running."""

    def __init__(self, kernel: Any):
        self.kernel, self.found = kernel, {}

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
        loads = {
            name: len(re.findall(rf"ld\.global[.\w]*{end}", asm["ptx"]))
            for name, end in LOADS.items()
        }
        self.found = resources(asm["cubin"]) | loads


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


def main() -> None:
    recorders = {}
    for module in (
        norm_modulate, qk_norm_rope, head_gate, pixel_norm_silu, snake_beta, quantise_rows,
        neighbourhood, unpack,
    ):  # fmt: skip
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, triton.runtime.JITFunction) and name.endswith("_kernel"):
                recorders[name] = Recorder(kernel)
                setattr(module, name, recorders[name])
    found, wanted = {}, re.compile(sys.argv[1] if len(sys.argv) > 1 else "")

    def compiled(name: str, kernel: str, function: Any, *operands: Any, **plan: Any) -> None:
        if wanted.match(name):
            function(*operands, **plan)
            found[name] = recorders[kernel].found

    tokens, f32 = 6144, torch.float32
    for heads, dim in ((None, 3840), (16, 256)):
        packed = meta(2, 1024, 8192)[..., : (heads or 1) * dim]
        x, view = (
            (packed.unflatten(2, (heads, dim)), (1, 1, 1, dim)) if heads else (packed, (1, 1, dim))
        )
        weight, plan = meta(dim, dtype=f32), {"views": (view,), "eps": 1e-6}
        compiled(f"norm_scale {dim}", "rows_kernel", norm_modulate.norm_scale, x, weight, **plan)
    for width in (4096, 2048):
        x, row, view = meta(4, tokens, width), meta(4, width), (4, 1, width)
        compiled(
            f"norm_modulate {width}", "rows_kernel", norm_modulate.norm_modulate, x, row, row,
            views=(view,) * 2, eps=1e-6,
        )  # fmt: skip
        compiled(
            f"modulate {width}", "rows_kernel", norm_modulate.modulate, x, row, row,
            views=(view,) * 2,
        )  # fmt: skip
        compiled(
            f"residual_norm_modulate of a partial sum {width}", "rows_kernel",
            residual_norm_modulate.residual_norm_modulate,
            x, x[:3], row[0], *[row] * 3, views=((1, 1, width), *[view] * 3), eps=1e-6, biased=True,
        )  # fmt: skip
        for pairs in (0, 1, 2):
            compiled(
                f"residual_norm_modulate {width}, {pairs} pairs", "rows_kernel",
                residual_norm_modulate.residual_norm_modulate,
                x, x, row, *[row] * 2 * pairs, views=(view,) * (1 + 2 * pairs), eps=1e-6,
            )  # fmt: skip
        compiled(
            f"residual_norm_modulate {width}, 2 pairs, quantised", "rows_kernel",
            residual_norm_modulate.residual_norm_modulate,
            x, x, row, *[row] * 4, views=(view,) * 5, eps=1e-6, quantised=(1, 2), unread=(2,),
        )  # fmt: skip
        compiled(
            f"gated_residual {width}", "rows_kernel", residual_norm_modulate.gated_residual, x, x,
            row, views=(view,),
        )  # fmt: skip
        levels, index = meta(4, 2, 9, width)[:, :, 4], meta(tokens, dtype=torch.int32)
        compiled(
            f"residual_norm_modulate {width}, 2 pairs by level", "rows_kernel",
            residual_norm_modulate.residual_norm_modulate,
            x, x, *[levels] * 5, index, views=((4, 2, width),) * 5, index_view=(1, tokens), eps=1e-6,
        )  # fmt: skip
        dim = width // 32
        for heads in (32, 4):  # of one device and of eight
            packed = meta(4, tokens, joined_rows(3 * heads * dim + heads))[
                ..., : heads * dim
            ].unflatten(2, (heads, dim))
            table, others = (meta(tokens, heads, dim // 2, dtype=f32) for _ in range(2))
            plan = {"weight_views": (None,), "table_views": ((1, *table.shape),), "eps": 1e-6}
            both = {
                "weight_views": (None,) * 2,
                "table_views": ((1, *table.shape),) * 2,
                "eps": 1e-6,
            }
            weight, total = meta(heads * dim), meta(4, tokens, dtype=f32)
            kernel, name = "qk_norm_rope_kernel", f"{heads} heads of {dim}"
            compiled(
                f"qk_norm_rope {name}", kernel, qk_norm_rope.qk_norm_rope, packed, weight, table,
                table, **plan,
            )  # fmt: skip
            compiled(
                f"qk_scale_rope {name}", kernel, qk_norm_rope.qk_scale_rope,
                packed, total, weight, table, table, count=width, **plan,
            )  # fmt: skip
            q, given = [packed, weight, table, table], [packed, total, weight, table, table]
            compiled(
                f"qk_norm_rope of q and k, {name}", kernel, qk_norm_rope.qk_norm_rope, *q, *q[:2],
                others, others, **both,
            )  # fmt: skip
            compiled(
                f"qk_norm_rope with the same tables, {name}", kernel, qk_norm_rope.qk_norm_rope, *q,
                *q, **both,
            )  # fmt: skip
            plan = {"weight_views": (None,) * 2, "eps": 1e-6}
            text = meta(2, 1024, joined_rows(2 * heads * dim))[..., : heads * dim].unflatten(
                2, (heads, dim)
            )
            compiled(
                f"qk_norm {name}", kernel, qk_norm_rope.qk_norm, packed, weight, text, weight,
                **plan,
            )  # fmt: skip
            v = meta(2, 1024, joined_rows(2 * heads * dim))[..., heads * dim : 2 * heads * dim]
            v, spread = v.unflatten(2, (heads, dim)), (0, 1, 0, 0)
            compiled(
                f"qk_norm and spread {name}", kernel, qk_norm_rope.qk_norm,
                packed, weight, text, weight, v, **plan, spread=spread,
            )  # fmt: skip
            sums = meta(2, 1024, dtype=f32)
            compiled(
                f"qk_scale {name}", kernel, qk_norm_rope.qk_scale,
                packed, total, weight, text, sums, weight, count=width, **plan,
            )  # fmt: skip
            compiled(
                f"qk_scale_rope of q and k, {name}", kernel, qk_norm_rope.qk_scale_rope, *given,
                *given, count=width, **both,
            )  # fmt: skip
            compiled(
                f"sum_squares {name}", "sum_squares_kernel", qk_norm_rope.sum_squares, packed,
                dims=(2, 3),
            )  # fmt: skip
            y = meta(4, heads, tokens, dim).transpose(1, 2)
            compiled(
                f"head_gate {name}", "head_gate_kernel", head_gate.head_gate, y,
                meta(4, tokens, heads),
            )  # fmt: skip
            compiled(
                f"head_gate_rows {name}", "head_gate_kernel", head_gate.head_gate_rows, y,
                meta(4, tokens, heads),
            )  # fmt: skip
            choice = meta(4, dtype=f32), packed
            compiled(
                f"head_gate of the values {name}", "head_gate_kernel", head_gate.head_gate,
                y, meta(4, tokens, heads), *choice,
            )  # fmt: skip
    for channels in (128, 1024):
        for last in (False, True):
            x = meta(1, channels, 16, 128, 192)
            x = x.to(memory_format=torch.channels_last_3d) if last else x
            name = f"pixel_norm_silu {channels} channels {'last' if last else 'first'}"
            compiled(
                name, "pixel_norm_silu_kernel", pixel_norm_silu.pixel_norm_silu, x, dim=1, eps=1e-8
            )
    taps, channel = meta(1, 1, 12, dtype=f32), meta(768, dtype=f32)
    x = meta(1, 768, 30240, dtype=f32)
    compiled(
        "snake_beta", "snake_beta_kernel", snake_beta.snake_beta, x, taps, taps, channel, channel,
        eps=1e-9,
    )  # fmt: skip
    for width in (2048, 4096, 16384):
        name = f"quantise_rows {width}"
        compiled(name, "quantise_rows_kernel", quantise_rows.quantise_rows, meta(4 * tokens, width))
    kernels = {"int8": "scaled_rows_kernel", "nvfp4": "nvfp4_kernel"}
    kernels |= {"stored float8": "scaled_rows_kernel"}
    kernels |= dict.fromkeys(("int8 rotated by 4", "int8 rotated by 256"), "rotated_rows_kernel")
    for encoding in (*kernels, *unpack.BLOCKS, "Q4_K or Q6_K"):
        shapes = ((16384, field.columns(4096)) for field in ENCODINGS[encoding].fields)
        dtypes = (getattr(torch, field.dtype) for field in ENCODINGS[encoding].fields)
        fields = [meta(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        compiled(
            f"unpack {encoding}", kernels.get(encoding, "blocks_kernel"), unpack.unpack, *fields,
            encoding=encoding, dtype="bfloat16",
        )  # fmt: skip
    gelu = meta(4 * tokens, 16384)
    compiled(
        "quantise_rows of a GELU", "quantise_rows_kernel", quantise_rows.quantise_rows, gelu,
        gelu=True,
    )  # fmt: skip
    for sizes, width, window in (
        ((121, 128, 192), 256, (11, 11, 11)),
        ((18, 16, 24), 2048, (3, 7, 7)),
    ):
        packed = meta(1, *sizes, 3 * width).unflatten(4, (3, width // 64, 64))
        plan = {"window": window, "first": (0, 0, 0), "scale": 0.125}
        compiled(
            f"neighbourhood_attention {window[2]}", "neighbourhood_attention_kernel",
            neighbourhood.neighbourhood_attention, meta(*packed.shape[:4], *packed.shape[5:]),
            *(packed[:, :, :, :, i] for i in (1, 2)), **plan,
        )  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
