"""Attention kernels and matrix products of LTX-2.3's steps against each other, before anything
larger is run.

Decides the shapes: two-stage 768x512x121. Each row is independent: a kernel that a build lacks, or
that refuses a shape, is a row with its error, and the others go on. It says which attention comes
first on this card (`ltx2rt_cuda.device.attention.preference`), whether cuDNN takes a mask, and
which road float8 products take.

    python -m benchmarks.race --output benchmarks/results/race.json
    python -m benchmarks.race --device cpu --shrink 16 --rounds 2

With `--sustain S` it races only the largest products, by each library that torch can ask, and each
candidate runs S seconds before it is timed: the clock and the rate are those of a card at its limit
of power. A row's `from` and `to` find its lines in the `power.csv` of `first_gpu.sh`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ltx2rt_cuda.device.attention import TORCH
from ltx2rt_cuda.ops.products import ROADS, Float8Product, quantise_rows
from torch.nn.attention import sdpa_kernel

from benchmarks.measure import Spread, interleaved, machine, record

# batch, queries, keys, heads, head_dim: video's own attention in stage 2 and, guided, in stage 1;
# the prompt; both directions between picture and sound; one of two devices.
ATTENTION = (
    (1, 6144, 6144, 32, 128),
    (3, 1536, 1536, 32, 128),
    (1, 6144, 1024, 32, 128),
    (1, 6144, 126, 32, 64),
    (1, 126, 6144, 32, 64),
    (3, 126, 1536, 32, 64),
    (3, 126, 1024, 32, 64),
    (3, 126, 126, 32, 64),
    (1, 3072, 3072, 16, 128),
)
# rows, contracted, columns: packed q, k, v; both halves of a feed-forward; an output; the sound's.
PRODUCTS = (
    (6144, 4096, 12320),
    (4608, 4096, 16384),
    (4608, 16384, 4096),
    (6144, 4096, 4096),
    (126, 8192, 2048),
    (272, 8192, 2048),
    (126, 4096, 2048),
    (126, 2048, 8192),
)
BATCH = 10  # calls between two readings of the clock
LARGEST = 3  # products that are raced under load
LIBRARIES = ("cublas", "cublaslt")  # torch takes the second where it is not told


def cases(
    device: torch.device, shrink: int, attention: Sequence[Sequence[int]] = ()
) -> list[tuple[str, int, Callable[[], Any]]]:
    """(name, FLOP, call) of every row. shrink: divides tokens and widths, for a machine without a
    GPU. attention: shapes as of ATTENTION, which are then all."""
    found: list[tuple[str, int, Callable[[], Any]]] = []
    for batch, queries, keys, heads, dim in attention or ATTENTION:
        queries, keys = (max(1, n // shrink) for n in (queries, keys))
        shape = f"{batch}x{queries}x{keys}x{heads}x{dim}"
        q, k, v = (
            drawn(device, batch, n, heads, dim).transpose(1, 2) for n in (queries, keys, keys)
        )
        mask = torch.zeros(1, 1, queries, keys, device=device, dtype=q.dtype)
        for name, kernel in TORCH.items():
            masked = queries == keys and name != "flash2" and not attention
            for given in (None, mask) if masked else (None,):

                def attend(kernel=kernel, q=q, k=k, v=v, mask=given):
                    with sdpa_kernel([kernel]):
                        return F.scaled_dot_product_attention(q, k, v, mask)

                with_mask = " with a mask" if given is not None else ""
                found.append(
                    (f"{name} {shape}{with_mask}", 4 * batch * queries * keys * heads * dim, attend)
                )
    for rows, inner, columns in () if attention else PRODUCTS:
        rows, inner, columns = (max(16, n // shrink) for n in (rows, inner, columns))
        x, weight, bias = (
            drawn(device, rows, inner),
            drawn(device, columns, inner),
            drawn(device, columns),
        )
        flop, shape = 2 * rows * inner * columns, f"{rows}x{inner}x{columns}"
        found.append((f"bfloat16 {shape}", flop, lambda x=x, w=weight, b=bias: F.linear(x, w, b)))
        (values, row_scale), (packed, scale) = quantise_rows(x), quantise_rows(weight)
        for name, product in ROADS.items():
            operands = Float8Product(values, row_scale, packed, scale, bias, torch.bfloat16)
            found.append((f"float8 by {name} {shape}", flop, lambda p=product, o=operands: p(o)))
        found.append((
            f"gelu behind {shape}", flop,
            lambda x=x, w=weight, b=bias: torch._addmm_activation(b, x, w.t(), use_gelu=True),
        ))  # fmt: skip
    return found


def drawn(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def sustained(device: torch.device, shrink: int) -> list[tuple[str, int, Callable[[], Any]]]:
    """The rows of `cases` that are one of the LARGEST products: in bfloat16 by each library, and in
    float8 with a scale a row."""
    largest = sorted(PRODUCTS, key=prod)[-LARGEST:]
    shapes = {"x".join(str(max(16, n // shrink)) for n in shape) for shape in largest}
    found = []
    for name, flop, run in cases(device, shrink):
        kind, *_, shape = name.split()
        if shape not in shapes or (kind == "float8" and " by rows " not in name):
            continue
        by = LIBRARIES if device.type == "cuda" and kind != "float8" else ("",)
        found += [(f"{name} {library}".strip(), flop, run) for library in by]
    return found


def timed(
    run: Callable[[], Any], device: torch.device, rounds: int, sustain_s: float = 0
) -> Spread:
    """Seconds of a call: rounds of BATCH calls with one wait at their end; on a GPU recorded, as
    the calls of a step are, since launching a small one takes longer than running it. sustain_s: of
    load before the first round."""

    def launch() -> None:
        for _ in range(BATCH):
            run()

    if device.type == "cuda":
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()

    def batch() -> None:
        if device.type == "cuda":
            graph.replay()
            torch.cuda.synchronize()
        else:
            launch()

    began = time.perf_counter()
    while time.perf_counter() - began < sustain_s:
        batch()
    return Spread.of([seconds / BATCH for seconds in interleaved({"": batch}, rounds)[""]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="attention kernels and products of a step against each other"
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument(
        "--shrink", type=int, default=1, help="divides tokens and widths (default: 1)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements of each row (default: 5)"
    )
    parser.add_argument(
        "--sustain", type=float, default=0, metavar="S",
        help="race the largest products, each after so many seconds of load",
    )  # fmt: skip
    parser.add_argument(
        "--attention", nargs="+", default=(), metavar="BATCHxQUERIESxKEYSxHEADSxDIM",
        type=lambda text: tuple(map(int, text.split("x"))),
        help="race these attentions alone, such as 1x32640x32640x32x128 of 1920x1088x121",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="JSON file for the rows")
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    torch.manual_seed(0)
    with torch.inference_mode():
        found = (
            sustained(device, args.shrink)
            if args.sustain
            else cases(device, args.shrink, args.attention)
        )
        facts = {"benchmark": "race", **machine("torch"), "shrink": args.shrink}
        facts |= {"sustain_s": args.sustain, "rows": rows}
        if device.type == "cuda":
            facts["device"] = torch.cuda.get_device_name()
        for name, flop, run in found:
            library, began = name.split()[-1], time.time()
            if library in LIBRARIES:
                torch.backends.cuda.preferred_blas_library(library)
            try:
                spread = timed(run, device, args.rounds, args.sustain)
            except (RuntimeError, NotImplementedError) as error:
                rows.append({"name": name, "error": str(error).strip().split("\n")[0][:200]})
                print(f"{name:48} {rows[-1]['error'][:100]}", flush=True)
            else:
                rows.append(
                    {"name": name, "flop": flop, "s": spread, "from": began, "to": time.time()}
                )
                rate = flop / spread.median / 1e12
                print(f"{name:48} {1e3 * spread.median:9.3f} ms {rate:8.1f} TFLOP/s", flush=True)
            record(args.output, facts)  # a run that is cut off leaves its rows so far


if __name__ == "__main__":
    main()
