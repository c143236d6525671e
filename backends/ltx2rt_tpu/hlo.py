"""Communication and products of a compiled program, counted in its scheduled HLO: how often each
instruction runs, how many bytes a collective brings to one device, the size of each convolution.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# no program of ours has them
OTHERS = ("collective-broadcast", "ragged-all-to-all", "send", "recv")
BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64"), 8),
}
SHAPE = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]")
FLAG_BYTES = 4  # flags of an asynchronous start, next to its arrays
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
COLLECTIVE = re.compile(rf" ({'|'.join(KINDS + OTHERS)})(-start)?\(")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)", re.DOTALL)
RESULT = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]")
CONVOLUTION = re.compile(
    r"^(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]*)\]\S* convolution\(%?([\w.\-]+), %?([\w.\-]+)\)"
)
CALLED = re.compile(
    r"(?:calls|to_apply|body|called_computations|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)


def collectives(hlo: str, steps: int | None = None) -> tuple[Counter[str], int]:
    """Executions of each kind in scheduled HLO text, and the bytes that one device receives. steps:
    how often the outermost loop runs, if its bounds are arguments of the program.

    A device receives, of results that together have B bytes in a group of g: 2 B (g-1)/g for an
    all-reduce, B (g-1)/g for an all-gather and an all-to-all, B (g-1) for a reduce-scatter, B for a
    permutation: bandwidth-optimal exchanges. Raises ValueError if a loop's length or a
    communication's bytes are unknown: neither is guessed.
    """
    counts: Counter[str] = Counter()
    total = 0.0
    for line, times, _ in _executed(hlo, steps):
        if match := COLLECTIVE.search(line):
            counts[match[1]] += times
            total += times * received(match[1], match[2] is not None, line)
    return counts, round(total)


def flops(hlo: str, steps: int | None = None) -> int:
    """2 x the multiply-adds of one call on one device, padding by zeros left out, as XLA counts
    them but for loops, which it counts once. On a TPU every matrix product is a convolution. Raises
    ValueError for a loop as `collectives` does, and for a kernel, of which the text says
    nothing."""
    total = 0
    for line, times, shapes in _executed(hlo, steps):
        if 'custom_call_target="tpu_custom_call"' in line:
            raise ValueError(f"a kernel, whose multiply-adds are not known here: {line[:200]}")
        total += times * product_flops(line, shapes)
    return total


def product_flops(line: str, shapes: Mapping[str, list[int]]) -> int:
    """FLOP of one execution of one instruction; 0 unless it is a convolution."""
    if (match := CONVOLUTION.match(line)) is None:
        return 0
    return 2 * _multiply_adds(line, dims(match[2]), *(shapes[name] for name in match.groups()[2:]))


def _executed(hlo: str, steps: int | None) -> Iterator[tuple[str, int, Mapping[str, list[int]]]]:
    """Every instruction that runs, how often, and its computation's shapes by name."""
    entry, bodies = computations(hlo)
    shapes = {
        name: {m[1]: dims(m[2]) for line in lines if (m := RESULT.match(line))}
        for name, lines in bodies.items()
    }

    def walk(name: str, times: int) -> Iterator[tuple[str, int, Mapping[str, list[int]]]]:
        for line in bodies.get(name, ()):
            if " while(" in line and not COLLECTIVE.search(line):
                body, n = loop(line, bodies, steps if name == entry else None)
                yield from walk(body, times * n)
                continue
            yield line, times, shapes[name]
            if not COLLECTIVE.search(line):
                for called in CALLED.findall(line):
                    for inner in re.findall(r"[\w.\-]+", called):
                        yield from walk(inner, times)

    yield from walk(entry, 1)


def computations(hlo: str) -> tuple[str, dict[str, list[str]]]:
    """The entry's name, and the instructions of every computation by name."""
    bodies: dict[str, list[str]] = {}
    entry = current = None
    for line in hlo.splitlines():
        if match := COMPUTATION.match(line):
            current = match[2]
            bodies[current] = []
            entry = current if match[1] else entry
        elif re.match("}(?!})", line):  # two of them end a kernel's metadata
            current = None
        elif current is not None and (INSTRUCTION.match(line) or not bodies[current]):
            bodies[current].append(line.strip())
        elif current is not None:  # a kernel's metadata continues on further lines
            bodies[current][-1] += f" {line.strip()}"
    if entry is None:
        raise ValueError("HLO text without an ENTRY computation")
    return entry, bodies


def loop(line: str, bodies: Mapping[str, list[str]], steps: int | None) -> tuple[str, int]:
    """The body of a `while` and how often it runs: `steps` times if the text leaves it open. Raises
    ValueError if nothing says it."""
    parts = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", line))
    condition = bodies[parts["condition"]]
    n = trips(parts["condition"], condition, line)
    n = steps if n is None else n
    if n is None:
        raise ValueError(f"a loop without a known trip count: {line[:200]} {condition}")
    return parts["body"], n


def trips(name: str, condition: list[str], line: str) -> int | None:
    """Trip count of a counted loop: the annotation, or the bound in its condition, of this name; a
    windowed product's loop counts two parts at a time."""
    if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"\}', line):
        return int(known[1])
    bounds = re.findall(r"[su]32\[\]\S* constant\((\d+)\)", "\n".join(condition))
    return int(bounds[0]) // (2 if "windowed_dot" in name else 1) if len(bounds) == 1 else None


def received(kind: str, start: bool, line: str) -> float:
    if kind in OTHERS:
        raise ValueError(f"a communication whose bytes are not known here: {line[:200]}")
    result = line.split(" = ", 1)[1].split(f" {kind}", 1)[0]
    sizes = [BYTES[dtype] * math.prod(dims(text)) for dtype, text in SHAPE.findall(result)]
    if start and kind != "all-reduce":  # (operands, results, flags): one result for each operand
        sizes = [size for size in sizes if size > FLAG_BYTES]
        sizes = sizes[len(sizes) // 2 :]
    size = sum(sizes)
    if kind == "collective-permute":
        return size
    devices = group(line)
    times = {"all-reduce": 2, "reduce-scatter": devices}.get(kind, 1)
    return times * size * (devices - 1) / devices


def group(line: str) -> int:
    match = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})", line)
    if match is None:
        raise ValueError(f"a collective without replica groups: {line[:200]}")
    return int(match[1] or len(match[2].split(",")))


def dims(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _multiply_adds(line: str, out: list[int], x: list[int], kernel: list[int]) -> int:
    """Pairs of an output and a tap along each window axis that meet a value and no zero."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line)
    assert labels is not None, line
    of_x, of_kernel, of_out = (
        dict(zip(names, sizes, strict=True))
        for names, sizes in zip(labels.groups(), (x, kernel, out), strict=True)
    )
    window = dict(re.findall(r"(\w+)=([-\dx_]+)", (re.search(r"window=\{[^}]*", line) or [""])[0]))
    groups = re.search(r"batch_group_count=(\d+)", line)
    total = of_kernel["i"] * of_kernel["o"] * of_x["b"] // (int(groups[1]) if groups else 1)
    for axis in filter(str.isdigit, of_kernel):
        stride, apart, spread, before = (
            int(window[key].split("x")[int(axis)].split("_")[0]) if key in window else least
            for key, least in (("stride", 1), ("rhs_dilate", 1), ("lhs_dilate", 1), ("pad", 0))
        )
        last = (of_x[axis] - 1) * spread
        taps = product(range(of_out[axis]), range(of_kernel[axis]))
        places = (o * stride + tap * apart - before for o, tap in taps)
        total *= sum(0 <= at <= last and at % spread == 0 for at in places)
    return total
