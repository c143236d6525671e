"""Runs the placed cases on torch ranks over gloo, forked for every world size in turn, or on 6 JAX
host devices, as a process of a test: python tensor_parallel_ranks.py KIND FOLDER

FOLDER holds what `write_inputs` writes. Written there: what each run gave,
`{kind}-{devices}-{run}.npz`, what every rank of torch did, `cuda-{devices}-rank{i}.json`, and what
a process took to load, `big-{who}.json`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ltx2rt.backend import get_backend
from ltx2rt.errors import Cancelled
from ltx2rt.graph import Graph
from ltx2rt.models import transformer
from ltx2rt.passes.fuse import fuse
from ltx2rt.passes.interleave import TOKENS, interleave
from ltx2rt.passes.rotate import rotate
from ltx2rt.placement.placement import Placement
from ltx2rt.placement.profiles import PROFILES
from ltx2rt.session.options import ModelOptions
from ltx2rt.session.session import Session
from ltx2rt.session.weights import Counted
from ltx2rt.stages import sound
from ltx2rt.stages.sound import vocode
from ltx2rt.weights.checkpoint import open_checkpoint
from ltx2rt.weights.files import DTYPES, TensorFile, TensorInfo, write_arrays
from ltx2rt.weights.lora.file import MergedSource, open_lora
from ltx2rt.weights.presets import preset
from tests.backends.loops import double, one_number
from tests.conftest import normal
from tests.parity import ArraySource
from tests.placed_cases import NAMES, case, lora_arrays
from tests.virtual import forked

RANKS = (3, 4)  # world sizes: an odd one, and one that leaves the text encoder's heads whole
MEASURED = 3  # world size of the memory measurement
CHUNK = 12  # audio latents in `sound_of`


@dataclass(frozen=True)
class Run:
    name: str
    dtype: str = "float32"
    lora: bool = False
    halved: bool = False  # rotated, tokens in halves, and fused, as on GPUs

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}{'-lora' * self.lora}{'-halved' * self.halved}"

    @cache  # noqa: B019
    def on(self, devices: int) -> Graph:
        graph = case(self.name, self.dtype).on(devices)
        return fuse(interleave(rotate(graph), TOKENS)) if self.halved else graph


RUNS = {
    "cuda": [
        *(Run(name) for name in NAMES if not name.startswith("forward")),  # guided ones have it
        *(Run(name, "bfloat16") for name in ("guided-2.0", "guided-2.3", "text-2.3")),
        Run("guided-2.0", lora=True),
        Run("guided-2.3", halved=True),
        Run("features-2.5"),
        Run("slabs-2.5"),
    ],
    # JAX takes seconds to compile one.
    "tpu": [Run("guided-2.3"), Run("text-2.0"), Run("text-2.5"), Run("features-2.5")],
}


def runs_on(kind: str, devices: int) -> list[Run]:
    """All at the first world size, at the other only the text encoder's, JAX one of them."""
    other = "text" if kind == "cuda" else "text-2.0"
    return [run for run in RUNS[kind] if devices == RANKS[0] or run.name.startswith(other)]


def write_inputs(folder: Path) -> None:
    for name in NAMES:
        write_arrays(folder / f"params-{name}.safetensors", case(name).params)
    for generation in ("2.0", "2.3"):
        arrays = lora_arrays(case(f"guided-{generation}").params)
        write_arrays(folder / f"lora-{generation}.safetensors", arrays)
    specs = big_graph().parameters()
    infos = {name: TensorInfo(spec.shape, DTYPES["BF16"]) for name, spec in specs.items()}
    blocks = {name: np.ones(info.shape, info.dtype) for name, info in infos.items()}
    write_arrays(folder / "big.safetensors", blocks)
    write_arrays(folder / "big-lora.safetensors", lora_arrays(blocks, rank=16))


def source_of(run: Run, folder: Path, merge):
    source = ArraySource(case(run.name, run.dtype).params)
    if not run.lora:
        return source
    lora = open_lora(folder / f"lora-{run.name[-3:]}.safetensors")
    return MergedSource(source, [lora], run.dtype, merge)


def run_all(kind: str, devices: int, folder: Path) -> dict:
    """Write outputs of each run; returns the collectives that each executed."""
    backend, executed = get_backend(kind, "cpu", {"tensor": devices}), {}
    for run in runs_on(kind, devices):
        one = case(run.name, run.dtype)
        graph = run.on(devices)
        weights = backend.load([graph], source_of(run, folder, backend.merge))
        program = backend.lower(graph)
        with collectives() as seen:
            outputs = called(backend, program, weights, one.inputs)
        executed[str(run)] = dict(seen) if kind == "cuda" else traced(program, weights, one.inputs)
        if backend.is_main:
            arrays = {
                name: x if isinstance(x, np.ndarray) else backend.to_host(x)
                for name, x in outputs.items()
            }
            np.savez(folder / f"{kind}-{devices}-{run}.npz", **arrays)
    return executed


def called(backend, program, weights, inputs) -> dict[str, Any]:
    """Return the program's outputs, joined where devices share slabs."""
    slabs = [name for name, v in program.graph.inputs.items() if "slabs" in v.type.axes]
    if not slabs:
        return program(weights, inputs)
    each = (
        inputs | {name: inputs[name][i : i + 1] for name in slabs}
        for i in range(program.graph.mesh["tensor"])
    )
    found = [*backend.each(((program, weights, feeds) for feeds in each), "frames")]
    if not backend.is_main:
        return {}
    return {"frames": np.concatenate([backend.to_host(x) for x in found])}


def traced(program, weights, inputs) -> dict[str, int]:
    """Collectives that JAX traces of a program, by primitive; a scan's body once."""
    from ltx2rt_tpu.program import upload
    from ltx2rt_tpu.weights import weights_on

    graph, place = program.graph, program.place
    uploaded = {name: upload(graph, name, value, place) for name, value in inputs.items()}
    text = str(program.function.trace(weights_on(place, graph, weights), uploaded).jaxpr)
    found = re.findall(r"= (psum\w*|all_\w+|ppermute|reduce_scatter|pmax|pmin|pbroadcast)\[", text)
    return dict(Counter(found))


@contextmanager
def collectives():
    """Every collective that torch dispatches meanwhile, under the name and dtype of its op."""
    seen: Counter = Counter()
    if "torch" not in sys.modules:
        yield seen
        return
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            space, name = function.name().split("::")
            passed_on = name.startswith(("wait_tensor", "send", "recv"))  # results of `each`, too
            if "c10d" in space and not passed_on:
                first = args[0][0] if isinstance(args[0], list) else args[0]
                seen[f"{name.split('.')[0].rstrip('_')} {first.dtype}"] += 1  # in place or not
            return function(*args, **(kwargs or {}))

    with Watch():
        yield seen


def requested_bytes(backend: Any, devices: int, folder: Path) -> dict[str, int]:
    """Bytes that this rank asks of the reader while it loads each case from a file."""
    files = {name: Counted(TensorFile(folder / f"params-{name}.safetensors")) for name in NAMES}
    for name, file in files.items():
        backend.load([Run(name).on(devices)], file)
    return {name: file.bytes for name, file in files.items()}


def shared_calls(backend: Any) -> dict[str, Any]:
    """How many of ten shared calls a reader and a call on which all agree let through, and the
    results of whole ones in the main process."""
    program, taken, found = backend.lower(double()), [], []

    def calls(until: int = 10):
        for i in range(10):
            if backend.agree(backend.position.rank == 1 and i == until):
                raise InterruptedError
            taken.append(i)
            yield program, {}, one_number(i)

    results = backend.each(calls(), "y")
    next(results)
    results.close()
    found.append(len(taken))
    try:
        deque(backend.each(calls(until=4), "y"), maxlen=0)
    except InterruptedError:
        found.append(len(taken) - found[0])
    made = backend.each(calls(), "y")
    values = [None if y is None else float(backend.to_host(y)[0]) for y in made]
    return {"taken": found, "values": values}


def sound_of(session: Session, check: Callable[[], None] = lambda: None) -> np.ndarray:
    """The waveform of three chunks of the vocoder."""
    return vocode(session, normal(1, 2, 70, 64), check)


def shared_sounds(backend: Any, folder: Path) -> dict[str, Any]:
    """How many chunks were made when rank 1 alone cancelled after two; the shape of the next
    sound, of which the main process writes a file."""
    checkpoint, made = open_checkpoint(folder / "model"), []
    session = Session(checkpoint, backend, ModelOptions("cuda", folder / "model"), "float32")

    def check() -> None:
        made.append(None)
        if backend.agree(backend.position.rank == 1 and len(made) == 2):
            raise Cancelled

    with contextlib.suppress(Cancelled):
        sound_of(session, check)
    waveform = sound_of(session)
    if backend.is_main:
        np.save(folder / "sound.npy", waveform)
    return {"made": len(made), "shape": waveform.shape}


def big_graph(dtype: str = "bfloat16") -> Graph:
    """LTX-2.3's transformer, real depth and 3/32 of its width: 360 MB."""
    config = replace(preset("ltx-2.3").config.transformer, num_heads=3, audio_num_heads=3)
    shape = transformer.ForwardShape(1, 1, 1, 1, (1,) * len(transformer.TABLES))
    return transformer.trace(config, shape, dtype)


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def measured_load(kind: str, mesh: dict[str, int], folder: Path) -> dict[str, int]:
    """With a LoRA: peak anonymous memory above that before the load, and the weights' bytes."""
    backend = get_backend(kind, "cpu", mesh)
    graph = Placement(PROFILES["hopper"], mesh).local(big_graph(), "transformer")
    square = np.ones((2, 2), np.float32)
    backend.merge(square, [([(square, square)], 1.0)], False)  # starts the framework's own threads
    file, lora = TensorFile(folder / "big.safetensors"), open_lora(folder / "big-lora.safetensors")
    source = MergedSource(file, [lora], "bfloat16", backend.merge)
    gc.collect()
    before, samples, done = anonymous_bytes(), [], threading.Event()

    def sample() -> None:
        while not done.is_set():
            samples.append(anonymous_bytes())
            time.sleep(0.001)

    thread = threading.Thread(target=sample)
    thread.start()
    weights = backend.load([graph], source)
    done.set()
    thread.join()
    samples.append(anonymous_bytes())
    share = sum(tensor.nbytes for tensor in weights.values())
    return {"peak": max(samples) - before, "share": share, "samples": len(samples)}


def rank_main(devices: int, rank: int, folder: Path, measure: bool = False) -> None:
    import torch

    if measure:
        name, found = "big", measured_load("cuda", {"tensor": devices}, folder)
    else:
        name, found = f"cuda-{devices}", {"executed": run_all("cuda", devices, folder)}
        backend = get_backend("cuda", "cpu", {"tensor": devices})
        found["requested"] = requested_bytes(backend, devices, folder)
        found["agreed"] = [backend.agree(backend.position.rank == 1), backend.agree(False)]
        found["shared"] = shared_calls(backend)
        if devices == RANKS[0]:
            found["sound"] = shared_sounds(backend, folder)
    (folder / f"{name}-rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "tpu":
        found = measured_load("tpu", {"data": 2, "tensor": MEASURED}, folder)
        (folder / "big-jax.json").write_text(json.dumps(found))
        for devices in RANKS:
            found = run_all("tpu", devices, folder)
            (folder / f"tpu-{devices}.json").write_text(json.dumps(found))
        return
    import ltx2rt_cuda.backend  # noqa: F401  torch, once for all ranks
    import torch._dynamo  # noqa: F401  which `Watch` imports

    sound.CHUNK = CHUNK
    if kind == "cuda-big":
        forked(MEASURED, lambda rank: rank_main(MEASURED, rank, folder, measure=True))
        return
    for devices in RANKS:
        for run in (*runs_on("cuda", devices), *map(Run, NAMES)):
            run.on(devices)  # once for all ranks
        forked(devices, lambda rank, size=devices: rank_main(size, rank, folder))


if __name__ == "__main__":
    main()
