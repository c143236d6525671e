"""Compile one full-size denoise step with the real TPU compiler, without a TPU, and count what it communicates.

Decides what is compiled and how collectives are counted: in the scheduled HLO, each multiplied by the trip counts of
the loops it is in. `libtpu` compiles for real topologies on any machine; weights are shapes only. The figures are of a
compiled program. Nothing is run.

    python -m benchmarks.tpu_compile --topology v6e:2x4 --mesh tensor=2,sequence=4 --preset ltx-2.0 --branches 2
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.measure import machine, record

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
CALLED = re.compile(r"(?:calls|to_apply|body|called_computations|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")


def collectives(hlo: str) -> tuple[Counter, float]:
    """Executions of each kind in scheduled HLO text, and the bytes that one device receives.

    A device receives, of operands that together have B bytes in a group of g: 2 B (g-1)/g for an all-reduce,
    (g-1)/g of the result for an all-gather and an all-to-all (bandwidth-optimal exchanges).
    """
    bodies: dict[str, list[str]] = {}
    entry = current = None
    for line in hlo.splitlines():
        if match := COMPUTATION.match(line):
            current = match[2]
            bodies[current] = []
            entry = current if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            bodies[current].append(line.strip())
    counts: Counter = Counter()
    received = 0.0

    def walk(name: str, times: int) -> None:
        nonlocal received
        for line in bodies.get(name, ()):
            kind = next((k for k in KINDS if re.search(rf" {k}(-start)?\(", line)), None)
            if kind is not None:
                counts[kind] += times
                received += times * _received(kind, line)
            elif " while(" in line:
                condition, body = (re.search(rf"{part}=%?([\w.\-]+)", line) for part in ("condition", "body"))
                assert condition and body, f"a loop without a body: {line[:200]}"
                walk(body[1], times * _trips(line, bodies[condition[1]]))
            else:
                for called in CALLED.findall(line):
                    for inner in re.findall(r"[\w.\-]+", called):
                        walk(inner, times)

    assert entry is not None, "no ENTRY computation"
    walk(entry, 1)
    return counts, received


def _trips(line: str, condition: list[str]) -> int:
    """How often a counted loop runs: annotated, or the bound that its condition compares the counter with."""
    if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"\}', line):
        return int(known[1])
    bounds = [int(n) for text in condition for n in re.findall(r"[su]32\[\]\S* constant\((\d+)\)", text)]
    assert len(bounds) == 1, f"a loop without a known trip count: {line[:200]} {condition}"
    return bounds[0]


def _received(kind: str, line: str) -> float:
    result = line.split(" = ", 1)[1].split(f" {kind}", 1)[0]
    sizes = []
    for dtype, dims in SHAPE.findall(result):
        size = BYTES[dtype]
        for n in dims.split(","):
            size *= int(n) if n else 1
        sizes.append(size)
    size = max(sizes) if f"{kind}-start(" in line and kind != "all-reduce" else sum(sizes)
    group = _group(line)
    share = (group - 1) / group
    return {"all-reduce": 2 * size * share, "collective-permute": size}.get(kind, size * share)


def _group(line: str) -> int:
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    match = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    assert match, f"no replica groups in {line[:200]}"
    return len(match[1].split(","))


def compile_step(topology: str, mesh: dict[str, int], name: str, branches: int, width: int, height: int, frames: int):
    """The figures of one guided step of preset `name`, or of stage 2 with one branch."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    from ltx2rt_tpu.backend import Program, abstract_weights

    from ltx2rt.pipeline.graphs import component_graph
    from ltx2rt.pipeline.request import GraphRequest
    from ltx2rt.placement.profiles import PROFILES, placed
    from ltx2rt.weights.presets import preset

    request = GraphRequest("guided-step", preset=name, width=width, height=height, num_frames=frames, branches=branches)
    graph = placed(component_graph(preset(name).config, request), "transformer", PROFILES["trillium"], mesh)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    grid = Mesh(np.array(devices).reshape(tuple(mesh.values())), tuple(mesh))
    program = Program(graph, NamedSharding(grid, P()), unrolled=False)
    weights = abstract_weights(graph, program.place)
    inputs = {
        name: jax.ShapeDtypeStruct(v.type.shape, v.type.dtype, sharding=NamedSharding(grid, P()))
        for name, v in graph.inputs.items()
    }
    lowered = program.function.lower(weights, inputs)
    start = time.perf_counter()
    memory = lowered.compile().memory_analysis()
    return {
        "compile_s": time.perf_counter() - start,
        "weights_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v6e:2x4")
    parser.add_argument("--mesh", default="tensor=2,sequence=4")
    parser.add_argument("--preset", default="ltx-2.0")
    parser.add_argument("--branches", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--num-frames", type=int, default=121)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    try:
        import libtpu  # noqa: F401
    except ImportError:
        sys.exit(
            "libtpu is not installed; pip install libtpu (into an environment of its own: JAX looks for a TPU then)"
        )
    from ltx2rt.pipeline.request import parse_mesh

    with tempfile.TemporaryDirectory() as dump:
        os.environ |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*_run.*",
        }
        size = (args.width, args.height, args.num_frames)
        facts = compile_step(args.topology, parse_mesh(args.mesh), args.preset, args.branches, *size)
        (text,) = (path.read_text() for path in Path(dump).glob("*after_optimizations.txt"))
    counts, received = collectives(text)
    asked = {key: value for key, value in vars(args).items() if key != "output"}
    found = {
        "benchmark": "tpu_compile",
        **machine("jax", "libtpu"),
        **asked,
        "collectives": dict(counts),
        "executed": sum(counts.values()),
        "received_bytes": received,
        **facts,
    }
    record(args.output, found)
    print(f"compiled, not run: {args.preset}, one step, {args.branches} branches, {args.topology}, {args.mesh}")
    print(f"  collectives executed {found['executed']}: {dict(counts)}")
    print(f"  received per device {received / 1e9:.2f} GB")
    print(
        f"  weights {facts['weights_bytes'] / 1e9:.2f} GB + temporaries {facts['temp_bytes'] / 1e9:.2f} GB per device"
    )
    print(f"  compile {facts['compile_s']:.0f} s")


if __name__ == "__main__":
    main()
