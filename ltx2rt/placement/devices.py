"""Kinds of devices by the figures of their data sheets, topologies by libtpu's names, and the
memory of this host."""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from ltx2rt.backend import backend_names, get_factory
from ltx2rt.errors import InputError
from ltx2rt.suggest import nearest

PCIE4, PCIE5 = 24e9, 48e9  # bytes per second that 16 lanes copy from pinned memory of the host


@dataclass(frozen=True)
class Sustained:
    """Rates that a device keeps up through whole requests, as shares of its data sheet's, and the
    time of a request in which no kernel runs.

    on: the kind that was measured. products, quantised: of the rate of products in bfloat16, in 8
    bits. kernels: of the rate in bfloat16, by the first words that `Timeline.compute` finds in a
    node's op, dtype and last axis. memory: of kernels that multiply nothing. launch_s: of each
    kernel outside of recorded steps. result_bytes_per_s: frames on their way to the host. reload_s:
    for each stage that reloads its weights. request_s: for a whole request. moved: the share of the
    bytes of kernels that multiply nothing which the compiler leaves, the rest is fused. exposed:
    the share of exchanges that is waited for. compiled: the rates are by the compiler's code for
    the kind, nothing ran.
    """

    on: str
    products: float
    quantised: float
    kernels: Mapping[str, float]
    memory: float
    launch_s: float
    result_bytes_per_s: float
    reload_s: float
    request_s: float
    moved: float = 1.0
    exposed: float = 1.0
    compiled: bool = False


@dataclass(frozen=True)
class DeviceKind:
    """One device as a program sees it. profile: how networks are split over several unless another
    is asked for. found_as: what its backend and its maker call it.

    memory_bytes: as sold; the driver offers a little more on GPUs, a little less on TPUs.
    flops_per_s: bfloat16, dense; quantised_flops_per_s: of quantised linears as the backend runs
    them. link_bytes_per_s: what one device can receive from the others of its machine. neighbours:
    the same by number of devices, (of an all-to-all, of any other collective), where the way
    between them is narrower. collective_s: the fixed latency of a collective.
    host_bytes_per_s: copied from pinned memory of the host. reserve_bytes, reserve_share: of
    `DeviceInfo`. sustained: None where no device like it has been measured. under_load: the rates
    are sustained ones.
    """

    name: str
    backend: str
    framework_kind: str  # Backend.device_kind
    profile: str
    memory_bytes: float
    flops_per_s: float
    quantised_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    collective_s: float
    found_as: tuple[str, ...] = ()
    neighbours: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    host_bytes_per_s: float = PCIE4
    reserve_bytes: int = 0
    reserve_share: float = 0.0
    sustained: Sustained | None = None
    under_load: bool = False
    kernels: Mapping[str, float] = field(default_factory=dict)  # FLOP/s
    moved: float = 1.0  # as `Sustained` has both
    exposed: float = 1.0

    def loaded(self) -> DeviceKind:
        """The kind at its sustained rates; itself where none are known."""
        if (s := self.sustained) is None:
            return self
        return replace(
            self,
            under_load=True,
            flops_per_s=s.products * self.flops_per_s,
            quantised_flops_per_s=s.quantised * self.quantised_flops_per_s,
            kernels={word: share * self.flops_per_s for word, share in s.kernels.items()},
            memory_bytes_per_s=s.memory * self.memory_bytes_per_s,
            moved=s.moved,
            exposed=s.exposed,
        )

    def basis(self, devices: int) -> str:
        """The origin of times on `devices` devices: measured on this kind, scaled from the kind
        that was, by the compiler's code, or a bound from the data sheet. No exchange between GPUs
        has been measured."""
        if self.sustained is None:
            return "bound"
        if self.sustained.compiled:
            return "compiled"
        return "measured" if self.sustained.on == self.name and devices == 1 else "scaled"

    def exchange_s(self, collective: str, devices: int, count: int, received_bytes: int) -> float:
        """Time of `count` collectives of `devices` devices that bring `received_bytes` each."""
        rate = self.link_bytes_per_s
        if self.neighbours:
            rates = self.neighbours[max(n for n in self.neighbours if n <= devices)]
            rate = rates[0 if collective == "all_to_all" else 1]
        return received_bytes / rate + count * self.collective_s


def device_kinds() -> dict[str, DeviceKind]:
    """All kinds by name, as the installed backends know them."""
    return dict(_kinds_of(tuple(backend_names())))


@cache
def _kinds_of(backends: tuple[str, ...]) -> dict[str, DeviceKind]:
    return {kind.name: kind for name in backends for kind in get_factory(name).device_kinds()}


UNREAD = (  # words of a device's name that do not tell its kind
    r"\b(nvidia|geforce|tesla|blackwell|workstation|server|edition|google|cloud)\b"
    r"|\b(tpu|gpu|hbm\w*|sxm\d?)\b"
)
AMD = re.compile(r"amd|radeon|instinct|gfx\d|mi ?\d{3}|\brx ?\d{4}", re.IGNORECASE)
# cores in a device, as names such as v5p-8 count them
CORES = {"v5e": 1, "v6e": 1, "v5p": 2, "v7x": 1}


def device_kind(name: str) -> DeviceKind:
    """The kind of a name in any spelling: h100, 4090, RTX-4090, "NVIDIA H100 80GB HBM3". Raises
    InputError."""
    found = _kinds(name)
    if len(found) == 1:
        return device_kinds()[found[0]]
    if found:
        raise InputError(f"--device-kind: {name!r} may be {' or '.join(found)}; choose one")
    if AMD.search(name):
        raise InputError(f"--device-kind: {name[:80]!r}: AMD GPUs are not supported")
    names = {model: kind.name for kind in device_kinds().values() for model in _names(kind)}
    near = nearest(_model(name)[0], names)
    meant = f"; did you mean {names[near]}?" if near else ""
    known = ", ".join(device_kinds())
    raise InputError(f"--device-kind: unknown {name[:80]!r}; known: {known}{meant}")


def kind_and_count(name: str) -> tuple[DeviceKind, int | None]:
    """The kind of a name, and the number of devices that a name such as 8xH100 or v6e-8 states.
    Raises InputError."""
    if not _kinds(name) and (several := _several(name)):
        return device_kinds()[several[0]], several[1]
    return device_kind(name), None


def _kinds(name: str) -> list[str]:
    """The kinds that the name may mean."""
    model, gigabytes = _model(name)
    named = [kind for kind in device_kinds().values() if model in _names(kind)]
    return [kind.name for kind in named if gigabytes in (None, kind.memory_bytes / 1e9)]


def _model(name: str) -> tuple[str, int | None]:
    """Model and gigabytes of a device's name, without case, vendor and form: ("h100", 80)."""
    text = re.sub(UNREAD, "", name[:80].lower().replace("_", " "))
    memory = re.search(r"\b(\d+) ?g(i?b)?\b", text)
    text = text.replace(memory[0], "") if memory else text
    return re.sub("[^a-z0-9]", "", text).removeprefix("tpu"), int(memory[1]) if memory else None


def _names(kind: DeviceKind) -> list[str]:
    """The models that a kind is known as: rtx4090 and 4090, v6e and what JAX calls it."""
    model = kind.name.partition("-")[0]
    found_as = [x for x in kind.found_as if x != kind.framework_kind]
    return [model, re.sub("^(rtx|v)", "", model), *(_model(x)[0] for x in found_as)]


def _several(name: str) -> tuple[str, int] | None:
    """Kind and number of devices of a name such as 8xH100 or v6e-8."""
    if match := re.fullmatch(r"(\d{1,4}) ?x ?(.+)", name.strip().lower()):
        found, count = _kinds(match[2]), int(match[1])
    elif match := re.fullmatch(r"(.+)-(\d{1,4})", name.strip()):
        found = [kind for kind in _kinds(match[1]) if kind in CORES]
        count = int(match[2]) // CORES[found[0]] if found else 0
    else:
        return None
    return (found[0], count) if len(found) == 1 and count else None


def known_kind(framework_kind: str, name: str, total_bytes: int) -> DeviceKind | None:
    """The kind of a device by what its driver calls it, if its links are known: not for a PCIe card
    (PCIe, NVL) of a kind that has NVLink."""
    name = name.lower().replace(" ", "")
    found = [
        kind
        for kind in device_kinds().values()
        if kind.framework_kind == framework_kind and "pcie" not in name and "nvl" not in name
        and (kind.name.split("-")[0] in name or name in (x.lower().replace(" ",
        "") for x in kind.found_as))
    ]  # fmt: skip
    return min(found, key=lambda kind: abs(kind.memory_bytes - total_bytes), default=None)


# libtpu's name -> kind, devices per chip
GENERATIONS = {"v5e": ("v5e", 1), "v5p": ("v5p", 1), "v6e": ("v6e", 1), "tpu7x": ("v7x", 2)}
# the chips of a slice as Google Cloud offers it, by their number
FLAT = {
    math.prod(sides): sides for sides in ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16))
}
DEEP = {
    math.prod(sides): sides
    for sides in ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8))
}
SLICES = {"v5e": FLAT, "v6e": FLAT, "v5p": DEEP, "tpu7x": DEEP}


def slice_chips(name: str) -> str:
    """A topology in libtpu's words, also of a slice's name: v7x-8 and ironwood:2x2x1 are
    tpu7x:2x2x1. Other names as they are."""
    kind, count = _several(name) or ("", 0)
    spelled, _, chips = name.partition(":")
    for generation, (known, in_chip) in GENERATIONS.items():
        if known == kind and (sides := SLICES[generation].get(count // in_chip)):
            return f"{generation}:{'x'.join(map(str, sides))}"
        if _kinds(spelled) == [known]:
            return f"{generation}:{chips or '1' + 'x1' * (len(SLICES[generation][4]) - 1)}"
    return name


def topology(name: str) -> tuple[DeviceKind, int]:
    """The devices of a topology in libtpu's words (generation:chips) or of a slice's name, and
    their number."""
    generation, _, chips = slice_chips(name).partition(":")
    if generation not in GENERATIONS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", chips):
        known = ", ".join(GENERATIONS)
        raise InputError(
            f"--device-kind: {name!r}, expected GENERATION:CHIPS of {known}, such as v6e:2x4 or "
            "tpu7x:2x2x1, or a slice such as v6e-8"
        )
    kind, cores = GENERATIONS[generation]
    return device_kinds()[kind], cores * math.prod(map(int, chips.split("x")))


# A container's view of its limits, in either version of the kernel's interface: limit, what
# is used, and which part of that are files that go when memory is wanted.
OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), *OLD),
)


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of the host, or of its share that this process' container has;
    available is what can be had without swapping."""
    import psutil

    found = psutil.virtual_memory()
    total, free = found.total, found.available
    for folder, limit_file, used_file, files in CGROUPS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, limit - used + int(stat[files]))
            total = min(total, limit)
    return total, free


def pins_memory() -> bool:
    """Whether this system pins as much memory as is asked for. Windows, and Linux inside of it
    (WSL), pin about 1 GB in all. `ulimit -l` does not count what CUDA pins."""
    return sys.platform == "linux" and "microsoft" not in platform.release().lower()
