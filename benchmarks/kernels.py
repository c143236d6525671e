"""Each kernel against eager torch, torch.compile and the least time that the device needs for its
bytes and FLOPs.

Decides the cases: every op with a kernel in the graphs of a two-stage request (a guided step of
both stages, the largest tile of the video decoder, the vocoder), with the operands that it has
there, drawn at random and lying as they do there: slices of packed rows, videos channels last, what
has several readers once. Of a float8 linear (`--weights-dtype float8`) it is the quantisation of
its operand. With `--stored TYPE ...` the blocks' matrices are kept as files of each type hold them.

For attention it prints how far each kernel that `--attention` names is from float64.

Contestants do the same op: `kernel` is the backend's choice, so on a CPU the plain ops, and the
reason is printed; `eager` is those plain ops; `compiled` is their Inductor code. The floor
is the op's least traffic, every operand read once and every result written once, at the measured
bandwidth of a large copy; of a linear layer with GELU its FLOPs at the measured rate of large
products, if that takes longer.

On a GPU calls are captured in CUDA graphs, as in the captured step, so that no launch is timed, and
go around sets of operands larger than its caches.

    python -m benchmarks.kernels --output benchmarks/results/kernels.json
    python -m benchmarks.kernels --preset tiny-2.3 --device cpu --width 64 --height 64 --num-frames
    9 --rounds 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from ltx2rt_cuda.backend import CudaBackend
from ltx2rt_cuda.ops import OPS, WITH_KERNEL
from ltx2rt_cuda.ops.table import DTYPES
from ltx2rt_kernels.choose import why_not

from benchmarks.measure import Spread, interleaved, machine, record
from ltx2rt.commands.options import PRESETS
from ltx2rt.errors import InputError
from ltx2rt.fused.head_gate import divided
from ltx2rt.graph.encodings import ENCODINGS, KEPT
from ltx2rt.graph.ir import Graph, Node, Type, Value
from ltx2rt.instruments.make import standing_for
from ltx2rt.passes.fuse import fuse
from ltx2rt.passes.loop import taken_apart
from ltx2rt.passes.unpack import keep, unpack
from ltx2rt.pipelines.two_stage import TwoStage
from ltx2rt.placement.cost import flops, node_flops
from ltx2rt.placement.devices import device_kind
from ltx2rt.run.estimate import datasheet_session
from ltx2rt.run.plan import make_plan
from ltx2rt.session.options import ATTENTION, ModelOptions

CONTESTANTS = ("kernel", "eager", "compiled")
# bytes of operands that calls go around: several times the 50 MB of an H100's or H200's L2 cache
COLD_BYTES = 256e6
# queries to measure attention's distance by: float64 scores of all would fill the memory
EXACT_QUERIES = 256
# that a measured run moves at least on a GPU: milliseconds, against which its one wait is nothing
RUN_BYTES = 20e9


@dataclass(frozen=True)
class Case:
    """One op on operands of certain types, and how often each part of a request executes it.

    packed: by operand that is a slice of a packed row, the row's type and the slice's start.
    """

    node: Node
    calls: dict[str, int]
    packed: dict[int, tuple[Type, int]]

    @property
    def minimum_bytes(self) -> int:
        """Every operand read once, every result written once; of a head gate v or y."""
        gate = self.node.op.startswith("head_gate")
        read = self.node.inputs[:3] if gate else self.node.inputs
        return sum(v.type.nbytes for v in (*read, *self.node.outputs))

    def __str__(self) -> str:
        x = self.node.inputs[0].type
        kind = self.node.attrs.get("encoding", x.dtype)
        return f"{self.node.op} {'x'.join(map(str, x.shape))} {kind}"


def request_graphs(
    preset: str,
    width: int,
    height: int,
    num_frames: int,
    levels: int,
    weights_dtype: str | None = None,
    mesh: Mapping[str, int] = MappingProxyType({}),
    parts: Sequence[str] = ("text", "stage1", "stage2", "decode", "audio"),
    stored: str | None = None,
) -> dict[str, Graph]:
    """Graphs on one H200, or one of a mesh: a step of each stage, and one call of the text encoder
    and of the decoders. levels: timesteps among the video tokens; an image adds one. weights_dtype:
    of the transformer's blocks. parts: what of the request to build. stored: the type in which
    files hold the matrices of the denoising stages."""
    options = ModelOptions("", Path(), weights_dtype=weights_dtype, mesh=mesh)
    size = {"width": width, "height": height, "num_frames": num_frames}
    request = TwoStage("a plan", **size, seed=0)
    with standing_for(preset, options) as options:
        session = datasheet_session(options, device_kind("h200-141gb"), prod(mesh.values()))
        calls = {
            stage.name: list(stage.needs(session.config))
            for stage in make_plan(session, request).stages
        }
        loops = {
            stage: found[-1] for stage, found in calls.items() if found[0].steps and stage in parts
        }
        loops = {
            s: replace(call, sizes=replace(call.sizes, video_levels=levels))
            for s, call in loops.items()
        }
        graphs = {stage: taken_apart(session.graph(call)).body for stage, call in loops.items()}
        graphs = {stage: _stored(graph, stored) for stage, graph in graphs.items()}
        others = {"text": calls["text"][0], "audio": calls["audio"][-1]}
        tiles = [call for call in calls["decode"] if call.each]
        others["decode"] = max(tiles, key=lambda call: flops(session.graph(call)))
        return graphs | {
            part: session.graph(call) for part, call in others.items() if part in parts
        }


def _stored(graph: Graph, kind: str | None) -> Graph:
    """The graph of matrices that a file holds in this type, if it says one."""
    if kind is None:
        return graph
    layouts, group = graph.all_layouts(), ENCODINGS[KEPT[kind]].group
    whole = (  # what ends within a group stays as it is
        name
        for declared, (_, count) in graph.all_params().items()
        if all(shape[-1] % group == 0 for _, shape in layouts[declared].parts)
        for layer in range(count)
        for name in layouts[declared].names(layer)
    )
    return unpack(keep(graph, dict.fromkeys(whole, KEPT[kind])))


def cases(graphs: dict[str, Graph], ops: Sequence[str]) -> list[Case]:
    """Every op with a kernel, once for each combination of operands."""
    found: dict[tuple, Case] = {}
    for part, graph in graphs.items():
        walked = list(fuse(graph).walk())
        makers = {id(v): node for node, _ in walked for v in node.outputs}
        for node, times in walked:
            node = quantisation(node) if node.op.endswith("_quantised_linear") else node
            if node.op in ops:
                packed = {
                    i: slice_
                    for i, v in enumerate(node.inputs)
                    if (slice_ := slice_of(makers, v)) is not None
                }
                ids = [id(v) for v in node.inputs]
                shared = tuple(map(ids.index, ids))
                key = (
                    node.op,
                    tuple(v.type for v in node.inputs),
                    repr(node.args),
                    repr(packed),
                    shared,
                )
                case = found.setdefault(key, Case(node, {}, packed))
                case.calls[part] = case.calls.get(part, 0) + times
    return sorted(found.values(), key=lambda case: case.node.op)


def slice_of(makers: Mapping[int, Node], v: Value) -> tuple[Type, int] | None:
    """The packed row that v is cut out of, and where it starts."""
    cut = makers.get(id(v))
    piece = makers.get(id(cut.inputs[0])) if cut is not None and cut.op == "split" else None
    if piece is None or piece.op != "slice" or piece.attrs["axis"] != "packed":
        return None
    return piece.inputs[0].type, piece.attrs["start"]


def quantisation(node: Node) -> Node:
    """The first work of a float8 linear behind a GELU or gated heads: their rows become e4m3. Norms
    quantise the rows of other linears."""
    if node.op.startswith("head_gate"):
        gate, _ = divided(node.inputs)
        y = gate[0].type
        rows, width = prod(y.shape[:2]), prod(y.shape[2:])
        shapes = {"values": (width, "float8_e4m3fn"), "scale": (1, "float32")}
        results = (
            Value(name, Type(("rows", "n"), (rows, n), dtype))
            for name, (n, dtype) in shapes.items()
        )
        return Node("head_gate_rows", tuple(gate), tuple(results), {}, {})
    x, width = node.inputs[0].type, node.inputs[1].type.shape[1]
    rows = x.num_elements // width
    shapes = {"x": (width, x.dtype), "values": (width, "float8_e4m3fn"), "scale": (1, "float32")}
    x, *results = (
        Value(name, Type(("rows", "n"), (rows, n), dtype)) for name, (n, dtype) in shapes.items()
    )
    return Node("quantise_rows", (x,), tuple(results), {}, {"gelu": node.op.startswith("gelu")})


def operands(case: Case, device: torch.device, generator: torch.Generator) -> list[torch.Tensor]:
    levels = min(
        (v.type.size("levels") for v in case.node.inputs if "levels" in v.type.axes), default=1
    )

    def draw(type: Type) -> torch.Tensor:
        if type.dtype in ("int8", "uint8", "float8_e4m3fn"):  # any bytes: no time depends on them
            drawn = torch.randint(
                256, type.shape, dtype=torch.uint8, device=device, generator=generator
            )
            return drawn.view(DTYPES[type.dtype])
        if "seen" in type.axes:  # each block sees itself and its neighbours
            first = torch.arange(type.shape[0]).clamp(max=type.shape[0] - type.shape[1])
            return (first[:, None] + torch.arange(type.shape[1])).int().to(device)
        if type.dtype == "int32":
            return torch.randint(
                levels, type.shape, dtype=torch.int32, device=device, generator=generator
            )
        return torch.randn(type.shape, dtype=DTYPES[type.dtype], device=device, generator=generator)

    drawn: dict[int, torch.Tensor] = {}
    for i, v in enumerate(case.node.inputs):
        if id(v) not in drawn:
            row, start = case.packed.get(i, (v.type, 0))
            x = draw(row)
            if i in case.packed:
                x = x.narrow(-1, start, v.type.num_elements // prod(row.shape[:-1])).reshape(
                    v.type.shape
                )
            last = case.node.op == "pixel_norm_silu" and x.ndim == 5
            drawn[id(v)] = x.contiguous(memory_format=torch.channels_last_3d) if last else x
    return [drawn[id(v)] for v in case.node.inputs]


def repeated(
    function: Callable, sets: Sequence[Sequence[torch.Tensor]], rounds: int
) -> Callable[[], None]:
    """`rounds` times a call on every set; on a GPU the calls of a round are one captured graph."""

    def once() -> None:
        for operands in sets:
            function(*operands)

    if sets[0][0].device.type != "cuda":
        return once
    once()  # compiles; nothing may be compiled while a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()

    def run() -> None:
        for _ in range(rounds):
            graph.replay()
        torch.cuda.synchronize()

    return run


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes/s that a large copy reads and writes, at its best: one by a kernel, as a recorded
    `copy_` is the copy engine's, which is slower on an H200 than the kernels that it is to
    bound."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    run = repeated(
        lambda a, b: torch.neg(a, out=b), [(source, target)], 10 if device.type == "cuda" else 1
    )
    calls = 10 if device.type == "cuda" else 1
    return 2 * source.nbytes * calls / min(interleaved({"copy": run}, rounds, warmup=2)["copy"])


@dataclass(frozen=True)
class Rates:
    """Rates that the device reaches: bytes/s of a copy, FLOP/s of a product."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, case: Case) -> float:
        return max(case.minimum_bytes / self.bytes_per_s, node_flops(case.node) / self.flops_per_s)


def product_rate(device: torch.device, dtype: torch.dtype, rounds: int = 9) -> float:
    """FLOP/s of large square matrix products, at their best."""
    size, calls = (8192, 20) if device.type == "cuda" else (512, 1)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def run() -> None:
        for _ in range(calls):
            torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return 2 * size**3 * calls / min(interleaved({"mm": run}, rounds, warmup=2)["mm"])


@torch.inference_mode()
def contest(
    case: Case, contestants: Sequence[str], device: torch.device, rounds: int, rates: Rates
) -> dict:
    """Microseconds a call of every contestant, with the bytes and the floor."""
    op, plan, minimum_bytes = case.node.op, case.node.args, case.minimum_bytes
    cuda = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(0)
    count = max(4, -int(-COLD_BYTES // minimum_bytes)) if cuda else 1
    repeats = max(1, -int(-RUN_BYTES // (count * minimum_bytes))) if cuda else 1
    sets = [operands(case, device, generator) for _ in range(count)]
    plain = OPS[op].__wrapped__
    torch._dynamo.reset()  # or the ninth set of shapes of an op would run uncompiled
    functions = {
        "kernel": OPS[op],
        "eager": plain,
        "compiled": torch.compile(plain, dynamic=False, fullgraph=True),
    }
    functions = {name: partial(functions[name], **plan) for name in contestants}
    runs = {name: repeated(function, sets, repeats) for name, function in functions.items()}
    seconds = interleaved(runs, rounds)
    floor = rates.floor_s(case) * 1e6
    return {
        "op": op,
        "operands": [str(v.type) for v in case.node.inputs],
        "calls": case.calls,
        "minimum_bytes": minimum_bytes,
        "why_not": why_not(op, *sets[0], **plan),
        "floor_us": floor,
        "us": {
            name: Spread.of([s / count / repeats * 1e6 for s in times])
            for name, times in seconds.items()
        },
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    backend = CudaBackend(args.device)
    device = backend.torch_device
    size = args.preset, args.width, args.height, args.num_frames, args.levels, args.weights_dtype
    graphs: dict[str, Graph] = {}
    for kind in args.stored or [None]:
        found = request_graphs(*size, stored=kind)
        graphs |= {f"{part}, {kind}" if kind else part: graph for part, graph in found.items()}
    facts = {
        "benchmark": "kernels",
        **machine("torch"),
        "preset": args.preset,
        "levels": args.levels,
    }
    facts |= {"weights_dtype": args.weights_dtype, "stored": args.stored}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name()
    facts |= {"clip": f"{args.width}x{args.height}x{args.num_frames}", "rounds": args.rounds}
    rates = Rates(
        copy_bandwidth(device, args.rounds), product_rate(device, torch.bfloat16, args.rounds)
    )
    facts |= {"copy_bytes_per_s": rates.bytes_per_s, "matmul_flops_per_s": rates.flops_per_s}
    print(
        f"{facts['device']}: a copy moves {rates.bytes_per_s / 1e9:.0f} GB/s, "
        f"a bfloat16 product reaches {rates.flops_per_s / 1e12:.3g} TFLOP/s"
    )
    facts["attention"] = distances(graphs, backend)
    for row in facts["attention"]:
        far = ", ".join(f"{name} {x:.2e}" for name, x in row["distance"].items())
        print(f"attention of {row['operands'][0]} to {row['operands'][1]}, from float64: {far}")
    for reason in {why for row in facts["attention"] for why in row["why_not"].values()}:
        print(reason)
    print(f"{'us':<58} {'floor':>9}" + "".join(f" {name:>18}" for name in args.contestants))
    facts["cases"] = []
    for case in cases(graphs, args.ops):
        found = contest(case, args.contestants, device, args.rounds, rates)
        facts["cases"].append(found)
        record(args.output, facts)  # a run that is cut off leaves its results so far
        columns = "".join(
            f" {s.median:>9.1f} = {s.median / found['floor_us']:>5.2f}x"
            for s in found["us"].values()
        )
        print(f"{case!s:<58} {found['floor_us']:>9.1f}{columns}", flush=True)
    facts["total_us"] = totals(facts["cases"], args.contestants)
    for part, total in facts["total_us"].items():
        columns = "".join(
            f" {total[name]:>9.1f} = {total[name] / total['floor']:>5.2f}x"
            for name in args.contestants
        )
        print(f"{'all of ' + part:<58} {total['floor']:>9.1f}{columns}")
    if reasons := {found["why_not"] for found in facts["cases"]} - {None}:
        print("plain ops run in place of kernels: " + "; ".join(sorted(reasons)))
    return facts


@torch.inference_mode()
def distances(graphs: Mapping[str, Graph], backend: CudaBackend) -> list[dict[str, Any]]:
    """The distance to float64 of each kernel of `--attention`, or why it is refused, for one sample
    of every attention without a mask, drawn at random: those of LTX are normalised too."""
    found, device = [], backend.torch_device
    nodes = (node for graph in graphs.values() for node, _ in graph.walk())
    cases = {
        tuple(v.type.resized("B", 1) for v in node.inputs): node.attrs["scale"]
        for node in nodes
        if node.op == "attention" and len(node.inputs) == 3
    }
    generator = torch.Generator(device).manual_seed(0)
    for types, scale in cases.items():
        q, k, v = (
            torch.randn(x.shape, dtype=DTYPES[x.dtype], device=device, generator=generator)
            for x in types
        )
        wide, *others = (x.double().transpose(1, 2) for x in (q[:, :EXACT_QUERIES], k, v))
        keys, values = (x.repeat_interleave(q.shape[2] // x.shape[1], dim=1) for x in others)
        exact = ((wide @ keys.mT * scale).softmax(-1) @ values).transpose(1, 2)
        row: dict[str, Any] = {"operands": [str(x) for x in types], "distance": {}, "why_not": {}}
        for name in ATTENTION:
            try:
                backend.attend_by(name, types[0].dtype)
            except InputError as error:
                row["why_not"][name] = str(error)
                continue
            y = backend.hardware.attention(q, k, v, None, scale)[:, :EXACT_QUERIES].double()
            row["distance"][name] = ((y - exact).norm() / exact.norm()).item()
        found.append(row)
    backend.attend_by("auto", "bfloat16")
    return found


def totals(cases: Sequence[dict], contestants: Sequence[str]) -> dict[str, dict[str, float]]:
    """Microseconds that all ops with a kernel take in one step, or one call, of each part."""
    found: dict[str, dict[str, float]] = {}
    for case in cases:
        times = {"floor": case["floor_us"]} | {
            name: case["us"][name].median for name in contestants
        }
        for part, calls in case["calls"].items():
            total = found.setdefault(part, dict.fromkeys(times, 0.0))
            for name, time in times.items():
                total[name] += calls * time
    return found


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(
        description="kernels against eager torch, torch.compile and the floor"
    )
    parser.add_argument("--preset", default="ltx-2.3", choices=PRESETS)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--num-frames", type=int, default=121)
    parser.add_argument(
        "--levels", type=int, default=1, help="timesteps among the video tokens; 2: with an image"
    )
    parser.add_argument("--weights-dtype", choices=("bfloat16", "float8"), default="bfloat16")
    parser.add_argument(
        "--stored", nargs="+", choices=KEPT, metavar="TYPE",
        help=f"types in which files hold the blocks' matrices: {', '.join(KEPT)}",
    )  # fmt: skip
    parser.add_argument(
        "--ops", nargs="+", choices=sorted(WITH_KERNEL), default=sorted(WITH_KERNEL), metavar="OP"
    )
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    args = parser.parse_args(argv)
    facts = measure(args)
    record(args.output, facts)
    return facts


if __name__ == "__main__":
    main()
