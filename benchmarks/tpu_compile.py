"""Compile one full-size denoise step with the real TPU compiler, without a TPU, and count what it communicates.

Decides what is compiled and how collectives are counted: in the scheduled HLO, each multiplied by the trip counts of
the loops it is in. `libtpu` compiles for real topologies on any machine; weights are shapes only. The figures are of a
compiled program. Nothing is run.

    python -m benchmarks.tpu_compile --topology v6e:2x4 --mesh tensor=2,sequence=4 --preset ltx-2.0 --branches 2
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import machine, record


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
    from ltx2rt_tpu.hlo import collectives

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
