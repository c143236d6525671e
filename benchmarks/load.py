"""Loading a transformer's weights: time against a plain safetensors read, and peak host memory.

Decides the checkpoint: a transformer of LTX-2.3 in bfloat16 with its real depth at 6/32 of its
width (so that the largest tensor is the share of the whole that it is in the real one), and a LoRA
of every linear layer at the rank that keeps the real proportion. Both are written on the fly; the
page cache is warm.

Every load happens in a fresh process, as in a real run (a second load would find memory that the
first one left), with 4 KiB pages for all: only numpy would ask for huge ones, which cost from a
tenth (a machine of one's own) to five times as much (a virtual one that gave free huge pages back
to the host).
  raw     the file's bytes read into one fresh buffer: the floor
  plain   `safe_open`, every tensor copied out of the mapped file and cast to the wanted dtype
  others  the backend's `load` through the same sources as `generate`, `+lora` with the LoRA merged
  on reading
Memory is anonymous (RssAnon, sampled every 2 ms from outside) above that before the load; pages of
the mapped file belong to the page cache.

    python -m benchmarks.load --output benchmarks/results/load-cpu.json
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Spread, machine, ratios, record
from ltx2rt.backend import get_backend
from ltx2rt.graph import Graph
from ltx2rt.instruments.tensors import BF16, F32, TABLE, lora_tensors
from ltx2rt.models import transformer
from ltx2rt.placement.cost import weight_bytes
from ltx2rt.weights.files import TensorFile, TensorInfo, write_tensors
from ltx2rt.weights.lora.file import MergedSource, open_lora
from ltx2rt.weights.presets import preset

SAMPLE_S = 0.002
LOADERS = ("raw", "plain", "cuda", "tpu", "cuda+lora", "tpu+lora")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Sizes:
    layers: int = 48
    heads: int = 6
    lora_rank: int = 72


TINY = Sizes(layers=2, heads=1, lora_rank=4)


def trace(sizes: Sizes, dtype: str) -> Graph:
    config = replace(
        preset("ltx-2.3").config.transformer,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        audio_num_heads=sizes.heads,
    )
    return transformer.trace(
        config, transformer.ForwardShape(1, 1, 1, 1, (1,) * len(transformer.TABLES)), dtype
    )


def write_checkpoint(folder: Path, sizes: Sizes) -> None:
    """model.safetensors and lora.safetensors: slices of one random block; values do not
    matter here."""
    shapes = {name: spec.shape for name, spec in trace(sizes, "float32").parameters().items()}
    model = {
        name: TensorInfo(shape, F32 if TABLE.search(name) else BF16)
        for name, shape in shapes.items()
    }
    lora = lora_tensors(preset("ltx-2.3").config, {"transformer": shapes}, sizes.lora_rank)
    block = np.random.default_rng(0).standard_normal(
        max(np.prod(shape) for shape in shapes.values()), np.float32
    )
    blocks = {F32: block, BF16: block.astype(BF16)}

    def values(info: TensorInfo) -> np.ndarray:
        return blocks[info.dtype][: np.prod(info.shape)].reshape(info.shape)

    for part, infos in (
        ("model", model),
        ("lora", {name: tensor.info for name, tensor in lora.items()}),
    ):
        write_tensors(
            folder / f"{part}.safetensors", infos, lambda name, infos=infos: values(infos[name])
        )


# --- in the fresh process -------------------------------------------------------------------------


def raw_read(path: Path) -> np.ndarray:
    buffer = np.empty(path.stat().st_size, np.uint8)
    with path.open("rb", buffering=0) as file:
        done = 0
        while count := file.readinto(buffer[done:]):
            done += count
    return buffer


def loader(name: str, dtype: str, sizes: Sizes, folder: Path) -> Callable[[], Any]:
    """A function that loads everything and returns it; imports and start-up are done before it is
    called."""
    model, lora = folder / "model.safetensors", folder / "lora.safetensors"
    if name == "raw":
        return lambda: raw_read(model)
    if name == "plain":
        import torch
        from safetensors import safe_open

        def plain() -> dict:
            with safe_open(model, framework="pt") as file:
                names = list(file.keys())
                return {
                    name: file.get_tensor(name).to(getattr(torch, dtype), copy=True)
                    for name in names
                }

        return plain
    kind, _, merged = name.partition("+")
    backend, graph = get_backend(kind, "cpu"), trace(sizes, dtype)
    square = np.ones((2, 2), np.float32)
    backend.merge(square, [([(square, square)], 1.0)], False)  # starts the framework's own threads

    def load() -> Any:
        source = TensorFile(model)
        return backend.load(
            [graph],
            MergedSource(source, [open_lora(lora)], dtype, backend.merge) if merged else source,
        )

    return load


def child(name: str, dtype: str, folder: str, *sizes: str) -> None:
    """Load once, when told to, and keep the result until told to end."""
    run = loader(name, dtype, Sizes(*map(int, sizes)), Path(folder))
    print("ready", flush=True)
    input()
    start = time.perf_counter()
    result = run()
    print(time.perf_counter() - start, flush=True)
    input()
    del result


# --- outside --------------------------------------------------------------------------------------


def anonymous_bytes(pid: int) -> int:
    """0 for a process that has ended. Linux only."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def load_once(name: str, dtype: str, folder: Path, sizes: Sizes) -> tuple[float, int]:
    """Seconds of one load in a fresh process, and the peak of its anonymous memory above that
    before."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.load",
        "--child",
        name,
        dtype,
        str(folder.resolve()),
    ]
    command += map(str, asdict(sizes).values())
    root, pipe, environment = (
        Path(__file__).parents[1],
        subprocess.PIPE,
        os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"},
    )
    with subprocess.Popen(
        command, cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdin and process.stdout
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name}, {dtype}: the loading process failed to start")
        before = peak = anonymous_bytes(process.pid)
        print("go", file=process.stdin, flush=True)
        while not select.select([process.stdout], [], [], SAMPLE_S)[0]:
            peak = max(peak, anonymous_bytes(process.pid))
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name}, {dtype}: the loading process failed to load")
        peak = max(peak, anonymous_bytes(process.pid))
        print("end", file=process.stdin, flush=True)
    return float(line), peak - before


def measure(
    folder: Path, sizes: Sizes, dtype: str, loaders: Iterable[str], rounds: int
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    peaks: dict[str, list[float]] = {name: [] for name in loaders}
    weights = weight_bytes([trace(sizes, dtype)])
    for _ in range(rounds):
        for name in seconds:
            time_s, peak = load_once(name, dtype, folder, sizes)
            seconds[name].append(time_s)
            peaks[name].append(peak / weights)
    return {
        "weights_bytes": weights,
        "seconds": {name: Spread.of(s) for name, s in seconds.items()},
        "ratio_to_plain": {
            name: ratios(seconds, name, "plain") for name in seconds if name != "plain"
        },
        "peak_per_weights": {name: Spread.of(p) for name, p in peaks.items()},
    }


def main(argv: list[str] | None = None) -> dict | None:
    parser = argparse.ArgumentParser(description="loading weights: time and peak memory")
    parser.add_argument(
        "--loaders", nargs="+", choices=LOADERS, default=LOADERS, metavar="NAME", help=str(LOADERS)
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a toy checkpoint, to see that it runs")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is written (default: a temporary folder)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(*args.child)
        return None
    sizes = TINY if args.tiny else Sizes()
    facts = {"benchmark": "load", **machine("torch", "jax", "safetensors"), "sizes": asdict(sizes)}
    facts["rounds"] = args.rounds
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_checkpoint(folder, sizes)
        print(f"{facts['device']}, load {facts['load']}; {sizes}")
        for part in ("model", "lora"):
            facts[f"{part}_bytes"] = (folder / f"{part}.safetensors").stat().st_size
            print(f"{part} of {facts[f'{part}_bytes'] / 1e9:.2f} GB in bfloat16")
        for dtype in args.dtypes:
            found = facts[dtype] = measure(
                folder, sizes, dtype, dict.fromkeys(("plain", *args.loaders)), args.rounds
            )
            for loader_name, spread in found["seconds"].items():
                ratio = found["ratio_to_plain"].get(loader_name, "1")
                peak = found["peak_per_weights"][loader_name]
                print(
                    f"{dtype} {loader_name:9} {spread} s = {ratio} x plain; peak "
                    f"{peak.median:.3f} x weights"
                )
    record(args.output, facts)
    return facts


if __name__ == "__main__":
    main()
