"""Compile placed graphs for TPUs that are not there: the real compiler, abstract arguments, no
weight and no device.

It needs jax and `libtpu`, works on any machine, and turns this process into one that sees no
accelerator but compiles for them.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from ltx2rt.backend import REMAT, Compiled, DoesNotFit
from ltx2rt.errors import InputError
from ltx2rt.graph import Graph
from ltx2rt.placement.devices import topology as kind_of
from ltx2rt_tpu.as_run import ASSEMBLED
from ltx2rt_tpu.cycles import Code
from ltx2rt_tpu.distributed import device_mesh
from ltx2rt_tpu.hlo import COLLECTIVE, collectives
from ltx2rt_tpu.program import Assembled, Loop, Program
from ltx2rt_tpu.roll import mean_taps
from ltx2rt_tpu.train import Gradients

# What libtpu would ask Google Cloud's metadata server; without an answer it complains on stderr.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class AheadCompiler:
    """graph -> its programs on a mesh of `topology`. InputError without libtpu, or if it fails."""

    def __init__(self, topology: str, mesh: Mapping[str, int], timed: bool = False):
        if find_spec("libtpu") is None:
            raise InputError(
                "compiling for TPUs needs libtpu, which is not installed; pip install libtpu"
            )
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.code = Code(kind_of(topology)[0]) if timed else None
        jax.config.update("jax_platforms", "cpu")
        # what comes from a cache leaves no HLO
        jax.config.update("jax_enable_compilation_cache", False)
        find = topologies.get_topology_desc
        try:
            self.devices = find(platform="tpu", topology_name=topology).devices
        except jax.errors.JaxRuntimeError as error:
            raise InputError(f"--topology: the compiler refuses {topology!r}: {error}") from error
        self.mesh = mesh

    def __call__(self, graph: Graph, part: str | None = None) -> Compiled:
        """`part` is the second argument of `BackendFactory.ahead_compiler`."""
        place, steps = self._place(graph), None
        if part == "before":
            lowered = Loop(graph, place, unrolled=False).lowered_before()
        elif part == "step":
            lowered, steps = Loop(graph, place, unrolled=False).lowered_steps(), 1
        elif part in REMAT:
            lowered = Gradients(graph, place, part).lowered()
        else:
            assert part in (None, "each"), part
            if graph.name in ASSEMBLED:
                return assembled(Assembled(graph, place), self.code)
            lowered = Program(graph, place, unrolled=False).lowered(part == "each")
        return compiled(lowered, steps, self.code)

    def _place(self, graph: Graph) -> Sharding:
        """The graph's own mesh where it is of all devices, else the one asked for."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        own = math.prod(graph.mesh.values()) == len(self.devices)
        return NamedSharding(device_mesh(self.devices, graph.mesh if own else self.mesh), P())


def compiled(lowered: Lowered, steps: int | None = None, code: Code | None = None) -> Compiled:
    """The figures of one program. steps: trip count of a loop with bounds that are arguments; None:
    there is no such loop. code: where the compiler leaves it, for the times of instructions. Raises
    DoesNotFit in the compiler's words."""
    module = lowered.compiler_ir().operation.attributes["sym_name"].value  # type: ignore[union-attr]
    with _dump(module) as (options, read):
        try:
            executable, took = _timed(partial(lowered.compile, compiler_options=options))
        except jax.errors.JaxRuntimeError as error:
            if found := re.search(r"Ran out of memory.*?(?=\. |$)", str(error)):
                raise DoesNotFit(found[0]) from error
            raise
        memory = executable.memory_analysis()
        assert memory is not None, "the compiler tells no memory"
        (text,) = read("after_optimizations")
        counts, received = collectives(text, steps)
        times_s = code.times(*read("after_codegen"), steps=steps) if code else None
    return Compiled(
        **took,
        collectives=dict(counts),
        received_bytes=received,
        weights_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        times_s=times_s,
    )


def assembled(program: Assembled, code: Code | None = None) -> Compiled:
    """The figures of one call of all executables; arrays for later nodes count as temporary."""
    times_s: Counter[str] = Counter()
    with _dump(f"jit_{program.graph.name}_*") as (options, read):

        def time_part(code: Code, part: Graph) -> None:
            (text,) = read("after_codegen")
            times_s.update(code.times(text, inner=mean_taps(part)))

        finished = partial(time_part, code) if code else None
        executables, took = _timed(partial(program.compile, options, finished))
        texts = filter(COLLECTIVE.search, read("after_optimizations"))
        found = [*map(collectives, texts)]  # loops of others may be of any length
    values = program.graph.inputs | program.graph.params
    sizes: dict[int, int] = {}
    peak = 0
    for part, executable, dropped in zip(program.parts, executables, program.dropped, strict=True):
        memory, results = executable.memory_analysis(), part.outputs.values()
        sizes |= {id(v): memory.output_size_in_bytes // len(results) for v in results}
        peak = max(peak, sum(sizes.values()) + memory.temp_size_in_bytes)
        for key in dropped:
            sizes.pop(key, None)
    return Compiled(
        **took,
        collectives=dict(sum((counts for counts, _ in found), Counter())),
        received_bytes=sum(received for _, received in found),
        weights_bytes=sum(v.type.nbytes for v in values.values()),
        temp_bytes=peak - sum(sizes.values()),
        output_bytes=sum(sizes.values()),
        times_s=dict(times_s) if code else None,
    )


def _timed(run: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The result, and the times of `Compiled`."""
    start, busy = time.perf_counter(), time.process_time()
    found = run()
    compile_s, cpu_s = time.perf_counter() - start, time.process_time() - busy
    return found, {"compile_s": compile_s, "compile_cpu_s": cpu_s}


@contextmanager
def _dump(module: str) -> Iterator:
    """Compiler options that leave the scheduled HLO of `module` (a pattern) in a folder, the user's
    own if XLA_FLAGS names one; and the reader of its unread texts, of one phase. Not `Compiled.as_text`:
    what comes back from the compiler for TPU7x does not parse with jaxlib 0.10.2."""
    flag = re.findall(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(flag[-1] if flag else folder)
        texts = f"*.{module}.*"  # the compiler may dump further modules there
        seen = set(path.glob(texts))

        def read(phase: str) -> list[str]:
            fresh = set(path.glob(f"{texts}{phase}.txt")) - seen
            seen.update(fresh)
            return [text.read_text() for text in fresh]

        yield {"xla_dump_to": str(path), "xla_dump_hlo_as_text": True}, read
