"""Time of each part of a compiled program, from the compiler's own code. Nothing is run.

Decides what an instruction costs, of which class it is, and what of an exchange no work hides. A
core issues one bundle of its final code in a cycle: an instruction takes its bundles times the
iterations of its window, a kernel its bundles times its blocks. Exchanges take the links one after
the other, each for a fixed latency plus the time of its bytes (`placement.devices`). All of a
synchronous one is exposed; of an asynchronous one, the time that its end still waits. Of two
branches the one of a true predicate counts: attention without a running maximum. Of a product
that adds up several parts, what its loop skips but for the last counts once for all of them.

It ranks programs; it is no measured time. It knows neither stalls for memory nor contention; links,
latency and the clock (the data sheet's FLOP/s by the FLOP of a cycle) are assumptions. A product
with a loop in its body has fewer bundles than it runs, so no product is counted faster than the
peak.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from ltx2rt.errors import InputError
from ltx2rt.placement.devices import DeviceKind
from ltx2rt_tpu.hlo import (
    CALLED,
    INSTRUCTION,
    KINDS,
    RESULT,
    SHAPE,
    computations,
    dims,
    group,
    loop,
    product_flops,
    received,
)

FLOP_PER_CYCLE = 524288  # bfloat16, two units of 256 x 256 that take 16 rows in 8 bundles
TIMED = ("v6e", "v7x")  # the generations with such cores
# flags of libtpu, set before it is loaded: the final bundles of every instruction, in a folder
ARGUMENTS = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
)
BUNDLES = re.compile(r"\d+-(.+)-\d+-schedule-analysis_final_bundles\.txt")
FINAL = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
# a branch forward and where it leads to, by their addresses
SKIP = re.compile(
    r"^ *(?:0x)?([0-9a-f]+) .*sbr\.rel \(%p\w+\) target = \$region(\d+)", re.MULTILINE
)
SKIPPED = re.compile(r"^ *(?:0x)?([0-9a-f]+) PF: .*Start/End empty region (\d+)", re.MULTILINE)
OPERATION = re.compile(r"\s*([\w\-]+)\((.*)", re.DOTALL)
KERNEL = 'custom_call_target="tpu_custom_call"'
# what neighbourhood attention gives: blocks in four axes, the tokens of a block, numbers of all heads
# (a program makes 128 of them)
BLOCKED = re.compile(r"neighbourhood_attention[\w.\-]* = \w+\[((?:\d+,){5}\d+)\]")
MOVING = {
    "copy", "transpose", "slice", "dynamic-slice", "concatenate", "pad", "dynamic-update-slice",
    "reverse",
}  # fmt: skip
WITH_MOVING = {
    "parameter", "bitcast", "reshape", "tuple", "get-tuple-element", "constant", "broadcast",
    "fusion", "bitcast-convert", "maximum", "select", "compare", "iota", "convert",
}  # fmt: skip


class Code:
    """The final code of this process's programs; made before libtpu loads. Raises InputError."""

    def __init__(self, kind: DeviceKind):
        if kind.name not in TIMED:
            raise InputError(
                f"--times: the clock of {kind.name} is not known, only {' and '.join(TIMED)}; "
                "leave it out"
            )
        self.kind, self._folder = kind, TemporaryDirectory(prefix="ltx2rt-code-")
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = f"{given} {ARGUMENTS.format(self._folder.name)}"

    def times(
        self, hlo: str, steps: int | None = None, inner: int | None = None
    ) -> dict[str, float]:
        """`times` of the program that was compiled last."""
        folder = Path(self._folder.name)
        found = times(hlo, bundles(folder), self.kind, steps, last_parts(folder), inner)
        for path in folder.iterdir():
            path.unlink()
        return found


def bundles(folder: Path) -> dict[str, int]:
    """Bundles of each instruction's final code, from one program's dump made with `ARGUMENTS`."""
    found = {}
    for path in folder.iterdir():
        match = BUNDLES.fullmatch(path.name)
        if match and (total := re.search(r"total scheduled bundles:\s+(\d+)", path.read_text())):
            found[match[1]] = int(total[1])
    return found


def last_parts(folder: Path) -> dict[str, int]:
    """Bundles of each instruction that a branch within the body of its loop skips."""
    found = {}
    for path in folder.iterdir():
        if match := FINAL.fullmatch(path.name):
            text = path.read_text()
            ends = {region: int(at, 16) for at, region in SKIPPED.findall(text)}
            skips = sorted((int(at, 16), ends[x]) for at, x in SKIP.findall(text) if x in ends)
            first, stop = max(skips, key=lambda skip: skip[1] - skip[0], default=(0, 0))
            for start, end in skips:
                if first < start and end <= stop:
                    found[match[1]] = found.get(match[1], 0) + end - start
                    first = end
    return found


def times(
    hlo: str,
    code: Mapping[str, int],
    kind: DeviceKind,
    steps: int | None = None,
    last: Mapping[str, int] = MappingProxyType({}),
    inner: int | None = None,
) -> dict[str, float]:
    """Seconds of one call on one device: by class of instructions; "guessed", by the compiler, of
    those that have no code; "exposed", of exchanges that nothing hides. Their sum is the time of
    the call.

    hlo: text after code generation, which tells windows; code: as `bundles` gives it, last: as
    `last_parts`; steps: as for `collectives`; inner: how often, on average, other loops of unknown
    length run. Raises ValueError as `collectives` does, and for a kernel that is no attention.
    """
    replay = _Replay(hlo, code, kind, steps, last, inner)
    replay.run(replay.entry, 1)
    found = {name: cycles / replay.clock for name, cycles in replay.cycles.items() if cycles}
    return found | {"exposed": replay.exposed_s}


@dataclass
class _Instruction:
    name: str
    op: str
    result: str
    text: str
    inside: Set[str] = field(default_factory=set)  # operations of the computations that it calls
    collective: str | None = None  # the line of the one that it is, starts or holds
    flops: int = 0


class _Replay:
    def __init__(
        self,
        hlo: str,
        code: Mapping[str, int],
        kind: DeviceKind,
        steps: int | None,
        last: Mapping[str, int],
        inner: int | None,
    ):
        self.entry, self.bodies = computations(hlo)
        self.code, self.kind, self.last = code, kind, last
        self.steps, self.inner = steps, inner
        self.clock = kind.flops_per_s / FLOP_PER_CYCLE
        self.cycles: defaultdict[str, float] = defaultdict(float)
        self.exposed_s = 0.0
        self._insides: dict[str, tuple[Set[str], str | None, int]] = {}
        self._parsed = {
            name: [self._instruction(line) for line in lines] for name, lines in self.bodies.items()
        }
        self._alike = {
            _signature(one): one.name
            for body in self._parsed.values()
            for one in body
            if one.name in code
        }

    def run(self, computation: str, times: int) -> float:
        """Seconds of one execution; it is run `times` times in all."""
        now = links = 0.0
        arriving: dict[str, float] = {}
        for one in self._parsed[computation]:
            if one.op == "while":
                steps = self.steps if computation == self.entry else self.inner
                body, n = loop(one.text, self.bodies, steps)
                now += n * self.run(body, times * n)
            elif one.op == "call":
                (called,) = _called(one.text)
                now += self.run(called, times)
            elif one.op == "conditional":
                now += self.run(_called(one.text)[-1], times)
            elif one.op.endswith(("-update", "-done")):
                started = re.findall(r"%([\w.\-]+)", one.text.split(f" {one.op}(", 1)[1])[0]
                if started in arriving:
                    arriving[one.name] = arriving[started]
                    if one.op.endswith("-done"):
                        now += self._wait(arriving[started] - now, times)
            elif one.collective:
                taken = self._exchange(one.collective)
                links = max(now, links) + taken
                if one.op.endswith("-start"):
                    arriving[one.name] = links
                else:
                    now += self._wait(links - now, times)
            else:
                name, cycles = self._cost(one)
                self.cycles[name] += cycles * times
                now += cycles / self.clock
        return now

    def _wait(self, seconds: float, times: int) -> float:
        seconds = max(0.0, seconds)
        self.exposed_s += seconds * times
        return seconds

    def _exchange(self, line: str) -> float:
        name = next(kind for kind in KINDS if re.search(rf" {kind}(-start)?\(", line))
        devices = 2 if name == "collective-permute" else group(line)
        brought = received(name, f" {name}-start(" in line, line)
        return self.kind.exchange_s(name.replace("-", "_"), devices, 1, round(brought))

    def _cost(self, one: _Instruction) -> tuple[str, float]:
        if KERNEL in one.text:
            return "kernels", self._kernel(one)
        windows = re.search(r'"iteration_bounds":\[([^\]]*)\]', one.text)
        bounds = [int(n) for n in re.findall(r"\d+", windows[1])] if windows else []
        guess = re.search(r'"estimated_cycles":"(\d+)"', one.text)
        name = self._alike.get(_signature(one)) if guess and one.name not in self.code else one.name
        if name not in self.code:
            return "guessed", int(guess[1]) if guess else 0
        kind, cycles = _class(one), self.code[name] * max(1, math.prod(bounds))
        if kind == "products" and bounds:  # the last bound is of the sum
            cycles -= self.last.get(name, 0) * math.prod(bounds[:-1]) * (bounds[-1] - 1)
        return kind, max(cycles, one.flops / FLOP_PER_CYCLE)

    def _kernel(self, one: _Instruction) -> float:
        """Cycles of attention: its bundles times its heads and blocks of queries and keys; of
        neighbourhoods, times the blocks that its queries come in."""
        stem = one.name.rsplit(".", 1)[0]
        alike = [n for name, n in self.code.items() if name.rsplit(".", 1)[0] == stem]
        found = self.code.get(one.name, max(alike, default=None))
        blocked = BLOCKED.search(one.text)
        if found and blocked:
            *blocks, _, numbers = dims(blocked[1])
            return found * math.prod(blocks) * (numbers // 128)
        blocks = [re.search(rf"\b{name}\W+(\d+)", one.text) for name in ("block_q", "block_kv")]
        types = SHAPE.findall(one.text.split("operand_layout_constraints={", 1)[-1])
        operands = [x for x in (dims(n) for _, n in types) if len(x) >= 3 and x[-1] in (64, 128)]
        q, k = operands[:2] or ([], [])
        if found is None or None in blocks or not q:
            raise ValueError(f"a kernel of which the code tells nothing: {one.text[:200]}")
        of_q, of_k = (int(block[1]) for block in blocks if block)
        return found * math.prod(q[:-2]) * math.ceil(q[-2] / of_q) * math.ceil(k[-2] / of_k)

    def _instruction(self, line: str) -> _Instruction:
        match = INSTRUCTION.match(line)
        assert match, line
        name, rest = match.groups()
        end = _type_end(rest)
        found = OPERATION.match(rest[end:])
        one = _Instruction(name, found[1] if found else "?", rest[:end], line)
        if one.op.removesuffix("-start") in KINDS:
            one.collective = line
        elif one.op not in ("while", "call", "conditional"):
            for called in _called(line):
                inside, collective, flops = self._inside(called)
                one.inside = one.inside | inside
                one.collective, one.flops = one.collective or collective, one.flops + flops
        return one

    def _inside(self, computation: str) -> tuple[Set[str], str | None, int]:
        """Operations of a computation and its callees; a collective's line; FLOP of products."""
        if computation not in self._insides:
            lines = self.bodies.get(computation, [])
            shapes = {m[1]: dims(m[2]) for line in lines if (m := RESULT.match(line))}
            inside: set[str] = set()
            collective, flops = None, 0
            for line in lines:
                one = self._instruction(line)
                inside |= {one.op} | one.inside
                collective = collective or one.collective
                flops += one.flops + product_flops(line, shapes)
            self._insides[computation] = inside, collective, flops
        return self._insides[computation]


def _called(line: str) -> list[str]:
    return [name for called in CALLED.findall(line) for name in re.findall(r"[\w.\-]+", called)]


def _type_end(rest: str) -> int:
    """Position of the end of the result's type."""
    depth = 0
    for at, character in enumerate(rest):
        depth += (character in "({") - (character in ")}")
        if character == " " and not depth:
            return at
    return len(rest)


def _signature(one: _Instruction) -> tuple[str, str, str]:
    """The key of instructions of the same code, wherever in the core's memory a result lies."""
    window = re.search(r'"window_config":\{[^}]*\}', one.text)
    return one.op, re.sub(r"S\(1\)", "", one.result), window[0] if window else ""


def _class(one: _Instruction) -> str:
    inside = one.inside or {one.op}
    if inside & {"convolution", "dot"}:
        return "products"
    if inside & MOVING and not inside - MOVING - WITH_MOVING:
        return "copies"
    return "reductions" if inside & {"reduce", "reduce-window"} else "elementwise"
