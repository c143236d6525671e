"""Compile placed graphs for TPUs that are not there: the real compiler, abstract arguments, no weight and no device.

Decides how the compiler is reached and what is read off its result. It needs `libtpu` beside jax, works on any machine,
and turns this process into one that sees no accelerator but compiles for them.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
from jax import ShapeDtypeStruct
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ltx2rt.backend import Compiled
from ltx2rt.errors import InputError
from ltx2rt.graph import Graph
from ltx2rt_tpu.backend import Program, weight_specs
from ltx2rt_tpu.hlo import collectives

# What libtpu would ask Google Cloud's metadata server; without an answer it complains on stderr.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class AheadCompiler:
    """graph -> Compiled, for the devices of `topology` in a mesh. InputError without libtpu, or where it refuses."""

    def __init__(self, topology: str, mesh: Mapping[str, int]):
        if find_spec("libtpu") is None:
            raise InputError("compiling for TPUs needs libtpu, which is not installed; pip install libtpu")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)  # what comes from a cache leaves no HLO
        try:
            devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        except jax.errors.JaxRuntimeError as error:
            raise InputError(f"--topology: the compiler refuses {topology!r}: {error}") from error
        if math.prod(mesh.values()) == 1:
            self.place = SingleDeviceSharding(devices[0])
        else:
            grid = np.array(devices).reshape(tuple(mesh.values()))
            self.place = NamedSharding(Mesh(grid, tuple(mesh)), P())

    def __call__(self, graph: Graph) -> Compiled:
        program = Program(graph, self.place, unrolled=False)
        lowered = program.function.lower(self._weights(graph), self._inputs(graph))
        module = lowered.compiler_ir().operation.attributes["sym_name"].value  # type: ignore[union-attr]
        with _dump(module) as (options, read):
            start, busy = time.perf_counter(), time.process_time()
            memory = lowered.compile(compiler_options=options).memory_analysis()
            compile_s, compile_cpu_s = time.perf_counter() - start, time.process_time() - busy
            assert memory is not None, "the compiler tells no memory"
            counts, received = collectives(read())
        return Compiled(
            compile_s=compile_s,
            compile_cpu_s=compile_cpu_s,
            collectives=dict(counts),
            received_bytes=received,
            weights_bytes=memory.argument_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        )

    def _inputs(self, graph: Graph) -> dict[str, ShapeDtypeStruct]:
        return {n: ShapeDtypeStruct(v.type.shape, v.type.dtype, sharding=self.place) for n, v in graph.inputs.items()}

    def _weights(self, graph: Graph) -> dict[str, ShapeDtypeStruct]:
        """Every parameter whole, `*` ones with their layers in front, with the sharding that cuts it."""
        specs, found = weight_specs(graph), {}
        for name, (value, count) in graph.all_params().items():
            shape = ((count,) if "*" in name else ()) + value.type.shape
            sharding = self.place
            if isinstance(sharding, NamedSharding):
                parts = [graph.mesh[axis] if axis else 1 for axis in specs[name]]
                shape = tuple(n * k for n, k in zip(shape, parts + [1] * (len(shape) - len(parts)), strict=True))
                sharding = NamedSharding(sharding.mesh, specs[name])
            found[name] = ShapeDtypeStruct(shape, value.type.dtype, sharding=sharding)
        return found


@contextmanager
def _dump(module: str) -> Iterator:
    """Compiler options that leave the scheduled HLO of `module` in a folder, the user's own if XLA_FLAGS names one; and
    its reader.

    Not `Compiled.as_text`: what comes back from the compiler for TPU7x does not parse with jaxlib 0.10.2.
    """
    flag = re.findall(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(flag[-1] if flag else folder)
        texts = f"*.{module}.*after_optimizations.txt"  # the compiler may dump modules of its own beside it
        before = set(path.glob(texts))

        def read() -> str:
            (text,) = set(path.glob(texts)) - before
            return text.read_text()

        yield {"xla_dump_to": str(path), "xla_dump_hlo_as_text": True}, read
