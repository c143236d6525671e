"""The table of full-size programs compiled for TPUs that are not there, beside targets and the
peer.

Decides the cells of the table; `ltx2rt compile` compiles them, each in a process of its own.
Nothing is run. Times to compile are for two idle cores; a busy machine (`load` in the JSON) takes
longer, and changes no other figure.

    python -m benchmarks.tpu_compile --cells step-2.0 upsampler --output
    benchmarks/results/compiled.json

The peer is MaxDiffusion 7cfb8801, LTX-2.0, compiled by the same compiler for the same topology and
counted alike; its default mesh, and the mesh with the fewest bytes received that was found.

LTX-2.5's video encoder, convolutional decoder, upsampler, audio decoder and vocoder are LTX-2.3's
graphs, node by node: they have no rows of their own.

The cell `real-time` adds up the rows of one clip of 1920x1088 with sound, from text to pixels and
waveform; it takes those that the output has with times, and compiles the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx2rt_tpu.hlo import flops

from benchmarks.measure import machine, record
from ltx2rt.instruments.ahead import in_words


@dataclass(frozen=True)
class Figures:
    """Executed collectives, bytes received, bytes of weights + temporaries, seconds; None: not
    checked."""

    executed: int | None = None
    received_bytes: float | None = None
    memory_bytes: float | None = None
    compile_s: float | None = None


@dataclass(frozen=True)
class Cell:
    """One row: a program (flags of `ltx2rt compile`) on a topology. peers: the same program
    elsewhere, by mesh. counted: whether the row says what the program multiplies, which only texts
    without kernels tell."""

    name: str
    topology: str
    flags: str
    target: Figures = Figures()
    peers: tuple[tuple[str, Figures], ...] = ()
    counted: bool = False


GB = 1e9
KINDS = {"v6e:2x4": "v6e-8", "tpu7x:2x2x1": "v7x-8"}
MESHES = {"v6e:2x4": "tensor=2,sequence=4", "tpu7x:2x2x1": "sequence=8"}
ROW = "{:<34} {:>11} {:>10} {:>21} {:>8}  {}"
STEP = Figures(compile_s=40)
DECODE = Figures(executed=0, received_bytes=0, compile_s=300)
STEP_2_0 = {  # one guided step of LTX-2.0, 6144 video tokens, two branches: target and peers
    "v6e:2x4": (
        Figures(None, 7.3 * GB, 22 * GB, 40),
        (
            ("1x1x8x1, default", Figures(7982, 47.8 * GB, 5.3 * GB)),
            ("2x1x2x2, fewest bytes", Figures(1204, 11.8 * GB, 19.4 * GB)),
        ),
    ),
    "tpu7x:2x2x1": (
        Figures(None, 2.7 * GB, 43 * GB, 40),
        (
            ("1x1x8x1, default", Figures(336, 14.2 * GB, 75.5 * GB)),
            ("Ulysses 2x1x4x1, fewest bytes", Figures(432, 3.4 * GB, 75.0 * GB)),
        ),
    ),
}
NEW = "--preset ltx-2.5 --num-frames 121"
HD = f"{NEW} --pipeline distilled --component denoise-step --width 1920 --height 1088"
DIFFUSION = f"{NEW} --pipeline distilled --video-decoder diffusion"
PROGRAMS = {  # name -> flags, target
    "step-2.3": ("--preset ltx-2.3 --component denoise-step --stage 2 --branches 4", STEP),
    "stage1-2.3": ("--preset ltx-2.3 --component denoise-step --stage 1", STEP),
    "stage2-2.3": ("--preset ltx-2.3 --component denoise-step --stage 2", STEP),
    "stage2-large-2.3": (
        # 24576 video tokens
        "--preset ltx-2.3 --component denoise-step --stage 2 --width 1536 --height 1024",
        STEP,
    ),
    "before-2.0": ("--preset ltx-2.0 --component denoise-before --stage 1", Figures()),
    "before-2.3": ("--preset ltx-2.3 --component denoise-before --stage 1", Figures()),
    "image": ("--preset ltx-2.3 --component video-encoder --stage 2", Figures()),
    "gemma": ("--preset ltx-2.3 --component text-encoder", Figures()),
    "upsampler": ("--preset ltx-2.3 --component upsampler", Figures()),
    "decode-tile-2.3": ("--preset ltx-2.3 --component video-decoder", DECODE),
    "decode-whole-2.3": ("--preset ltx-2.3 --component video-decoder --vae-tiling off", DECODE),
    "decode-whole-2.0": ("--preset ltx-2.0 --component video-decoder --vae-tiling off", DECODE),
    "audio-decoder": ("--preset ltx-2.3 --component audio-decoder", Figures()),
    "vocoder": ("--preset ltx-2.3 --component vocoder", Figures()),
    "step-2.5": (f"{NEW} --pipeline distilled --component denoise-step --stage 2", STEP),
    "stage1-2.5": (f"{NEW} --pipeline distilled --component denoise-step --stage 1", STEP),
    "stage1-hd-2.5": (f"{HD} --stage 1", STEP),
    "stage2-hd-2.5": (f"{HD} --stage 2", STEP),
    "guided-2.5": (f"{NEW} --component denoise-step --stage 1", STEP),
    "before-2.5": (f"{NEW} --pipeline distilled --component denoise-before --stage 1", Figures()),
    "gemma4": (f"{NEW} --pipeline distilled --component text-encoder", Figures()),
    "duration-head": ("--preset ltx-2.5 --pipeline distilled --component duration-head", Figures()),
    "decode-hd-2.5": (
        f"{DIFFUSION} --component diffusion-slabs --width 1920 --height 1088",
        Figures(),
    ),
    "diffusion-slabs": (f"{DIFFUSION} --component diffusion-slabs", Figures()),
    "diffusion-features": (f"{DIFFUSION} --component diffusion-features", DECODE),
    "diffusion-decoder": (f"{DIFFUSION} --component diffusion-decoder", DECODE),
    **{
        f"{name}-hd-2.5": (HD.replace("denoise-step", component), Figures())
        for name, component in (
            ("text", "text-encoder"),
            ("before1", "denoise-before --stage 1"),
            ("upsampler", "upsampler"),
            ("before2", "denoise-before --stage 2"),
            ("audio", "audio-decoder"),
            ("vocoder", "vocoder"),
        )
    },
}

REAL_TIME = {  # cell -> calls on one device for one clip of 1920x1088, 121 frames, with sound
    "text-hd-2.5": 1, "before1-hd-2.5": 1, "stage1-hd-2.5": 8, "upsampler-hd-2.5": 1,
    "before2-hd-2.5": 1, "stage2-hd-2.5": 3, "audio-hd-2.5": 2, "vocoder-hd-2.5": 1,
    "decode-hd-2.5": 1,
}  # fmt: skip
PLANNED = f"plan {DIFFUSION} --width 1920 --height 1088 --json"


def sized(flags: str) -> str:
    """The flags at the size of the table's other rows, unless they have one."""
    return flags if "--width" in flags else f"{flags} --width 768 --height 512"


CELLS = tuple(
    cell
    for where, (target, peers) in STEP_2_0.items()
    for cell in (
        Cell(
            "step-2.0", where,
            sized("--preset ltx-2.0 --component denoise-step --stage 2 --branches 2"), target, peers,
        ),
        *(
            Cell(name, where, sized(flags), aim, counted=name.startswith("diffusion"))
            for name, (flags, aim) in PROGRAMS.items()
        ),
    )
)  # fmt: skip


def compile_cell(cell: Cell, times: bool = False) -> dict[str, Any]:
    """The row of one cell; times: with estimated ones. Raises RuntimeError with the command's own
    words if it fails."""
    words = [
        "compile",
        "--topology",
        cell.topology,
        "--mesh",
        MESHES[cell.topology],
        *cell.flags.split(),
        "--json",
    ]
    words += ["--times"] * times
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | ({"XLA_FLAGS": f"--xla_dump_to={folder}"} if cell.counted else {})
        ran = subprocess.run(
            [sys.executable, "-m", "ltx2rt", *words], capture_output=True, text=True, env=env
        )
        texts = [path.read_text() for path in Path(folder).glob("*after_optimizations.txt")]
    if ran.returncode:
        raise RuntimeError(f"{cell.name}, {cell.topology}: {ran.stderr.strip().splitlines()[-1]}")
    (found,) = json.loads(ran.stdout)
    if "why_not" in found:
        raise RuntimeError(f"{cell.name}, {cell.topology}: does not fit, {found['why_not']}")
    if cell.counted:  # the compiler leaves small programs of its own beside it
        found["compiled_flops"] = flops(max(texts, key=len))
    return {
        "cell": cell.name,
        **found,
        "command": f"ltx2rt {' '.join(words)}",
        **machine("jax", "libtpu"),
    }


def real_time(topology: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row of a whole clip: its parts by the rows' times, and what `plan` says of the same mesh
    with its weights loaded. The host's work is in neither."""
    by_cell = {row["cell"]: row for row in rows if row["topology"] == topology}
    parts = [
        {
            "cell": name,
            "calls": calls,
            "call_s": sum(by_cell[name]["times_s"].values()),
            "commit": by_cell[name]["commit"],
        }
        for name, calls in REAL_TIME.items()
    ]
    where = ["--device-kind", KINDS[topology], "--mesh", MESHES[topology]]
    command = [sys.executable, "-m", "ltx2rt", *PLANNED.split(), *where]
    planned = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {
        "cell": "real-time",
        "topology": topology,
        "mesh": planned["mesh"],
        "parts": parts,
        "time_s": sum(part["calls"] * part["call_s"] for part in parts),
        "plan_s": sum(stage["steps"] * stage["time_s"] for stage in planned["stages"]),
        "plan_command": f"ltx2rt {' '.join(command[3:])}",
        **machine("jax"),
    }


def show_real_time(row: Mapping[str, Any]) -> str:
    lines = [f"real-time, {row['topology']}: {row['time_s']:.2f} s; by plan {row['plan_s']:.2f} s"]
    for part in row["parts"]:
        each = f"{part['calls']} x {part['call_s'] * 1e3:.1f} ms"
        lines.append(f"  {part['cell']:<18} {each:>14}, at {part['commit']}")
    return "\n".join(lines)


def figures(row: dict[str, Any]) -> Figures:
    memory = row["weights_bytes"] + row["temp_bytes"]
    return Figures(
        sum(row["collectives"].values()), row["received_bytes"], memory, row["compile_s"]
    )


def line(name: str, f: Figures, note: str = "") -> str:
    texts = [
        "" if f.executed is None else str(f.executed),
        "" if f.received_bytes is None else f"{f.received_bytes / GB:.2f} GB",
        "" if f.memory_bytes is None else f"{f.memory_bytes / GB:.2f} GB",
        "" if f.compile_s is None else f"{f.compile_s:.0f} s",
    ]
    return ROW.format(name, *texts, note).rstrip()


def show(cell: Cell, row: dict[str, Any]) -> str:
    note = f"{row['compile_cpu_s']:.0f} s{'' if row['fits'] else ', does NOT fit'}"
    note += f", {row['compiled_flops'] / 1e12:.1f} TFLOP" if cell.counted else ""
    lines = [
        line(f"{cell.name}, {cell.topology}", figures(row), note) + in_words(row.get("times_s"))
    ]
    if cell.target != Figures():
        lines.append(line("  target, at most", cell.target))
    return "\n".join([*lines, *(line(f"  peer, {mesh}", f) for mesh, f in cell.peers)])


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = tuple(dict.fromkeys(cell.name for cell in CELLS))
    parser.add_argument(
        "--cells", nargs="+", choices=(*names, "real-time"), default=names, metavar="NAME",
        help=f"{', '.join(names)}; real-time",
    )  # fmt: skip
    parser.add_argument("--topology", nargs="+", choices=tuple(MESHES), default=tuple(MESHES))
    parser.add_argument(
        "--times", action="store_true", help="estimate times by the compiler's code; takes longer"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="JSON; rows of other cells in it are kept"
    )
    args = parser.parse_args(argv)
    if "real-time" in args.cells and not args.times:
        parser.error("real-time adds up times; give --times")
    rows = (
        json.loads(args.output.read_text())["rows"] if args.output and args.output.exists() else []
    )
    facts = {
        "benchmark": "tpu_compile",
        "note": "compiled, not run; of one device and one call",
        "rows": rows,
    }
    print("compiled, not run; of one call and one device")
    print(
        ROW.format(
            "", "collectives", "received", "weights + temporaries", "compile", "processor time"
        )
    )

    def keep(row: dict[str, Any], text: str) -> None:
        print(text, flush=True)
        key = (row["cell"], row["topology"])
        facts["rows"] = [r for r in facts["rows"] if (r["cell"], r["topology"]) != key] + [row]
        record(args.output, facts)

    timed = {(row["cell"], row["topology"]) for row in rows if row.get("times_s")}
    whole = "real-time" in args.cells
    for cell in CELLS:
        part = whole and cell.name in REAL_TIME and (cell.name, cell.topology) not in timed
        if (part or cell.name in args.cells) and cell.topology in args.topology:
            row = compile_cell(cell, args.times)
            keep(row, show(cell, row))
    for topology in args.topology if whole else ():
        row = real_time(topology, facts["rows"])
        keep(row, show_real_time(row))
    return facts


if __name__ == "__main__":
    main()
