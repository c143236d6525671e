"""Kinds of devices by the figures of their data sheets, topologies by libtpu's names, and the memory of this host."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ltx2rt.errors import InputError
from ltx2rt.suggest import nearest

PCIE4, PCIE5 = 24e9, 48e9  # bytes per second that 16 lanes copy from pinned memory of the host


@dataclass(frozen=True)
class DeviceKind:
    """One device as a program sees it. profile: how networks are split over several unless another is asked for.
    found_as: what its backend calls it.

    memory_bytes: as sold; what the driver offers is a little more on GPUs, a little less on TPUs.
    flops_per_s: bfloat16, dense; float8_flops_per_s: of float8 linears as the backend runs them.
    link_bytes_per_s: what one device can receive from the others of its machine. neighbours: the same among so many
    devices, (of an all-to-all, of any other collective), where the way between them is narrower.
    host_bytes_per_s: copied from pinned memory of the host.
    """

    name: str
    backend: str
    framework_kind: str  # Backend.device_kind
    profile: str
    memory_bytes: float
    flops_per_s: float
    float8_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    found_as: tuple[str, ...] = ()
    neighbours: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    host_bytes_per_s: float = PCIE4

    def exchange_s(self, collective: str, devices: int, count: int, received_bytes: int) -> float:
        """The time of so many collectives among so many devices, by which one of them receives so many bytes."""
        rate = self.link_bytes_per_s
        if self.neighbours:
            rates = self.neighbours[max(n for n in self.neighbours if n <= devices)]
            rate = rates[0 if collective == "all_to_all" else 1]
        return received_bytes / rate + count * COLLECTIVE_S[self.framework_kind]

    @property
    def reserve_bytes(self) -> int:
        """Memory that a run must leave free."""
        return gpu_reserve_bytes(int(self.memory_bytes)) if self.framework_kind == "cuda" else 0


def gpu_reserve_bytes(total_bytes: int) -> int:
    """What PyTorch's pools, cuBLAS's and cuDNN's workspaces and fragmentation take of a GPU: 3 GB and 2 %."""
    return int(3e9 + 0.02 * total_bytes)


# What a collective takes beside its bytes. Assumed; nobody has measured it here.
COLLECTIVE_S = {"cuda": 10e-6, "tpu": 2e-6}
# An ICI link brings 90 GB/s (JAX scaling book). Neighbours on a v6e 2x4, which has no wrap, and on the chips of two
# devices of a v7x 2x2x1: a pair has one link, or is on one chip; a line of 4 passes half of an all-to-all of its pairs
# through the middle; 8 have two links on v6e, of which those of a v7x chip's devices are one each.
V6E_LINKS = {2: (90e9, 90e9), 4: (67.5e9, 90e9), 8: (79e9, 180e9)}
V7X_LINKS = {2: (300e9, 300e9), 4: (67.5e9, 90e9), 8: (79e9, 90e9)}

# JAX multiplies float8 numbers as bfloat16 ones; so does an A100, which has no units for them. Cards without NVLink
# receive over PCIe: 32 GB/s of generation 4, 64 GB/s of generation 5.
DEVICE_KINDS = {
    kind.name: kind
    for kind in (
        # NVIDIA H100 data sheet, SXM: 1979 TFLOP/s with sparsity and 3958 in float8, NVLink 900 GB/s in both
        # directions together.
        DeviceKind(
            "h100-80gb",
            "cuda",
            "cuda",
            "hopper",
            80e9,
            989.5e12,
            1979e12,
            3.35e12,
            450e9,
            ("cuda",),
            host_bytes_per_s=PCIE5,
        ),
        # NVIDIA H200 data sheet, SXM: the same chip and links with other memory.
        DeviceKind(
            "h200-141gb",
            "cuda",
            "cuda",
            "hopper",
            141e9,
            989.5e12,
            1979e12,
            4.8e12,
            450e9,
            ("cuda",),
            host_bytes_per_s=PCIE5,
        ),
        # NVIDIA A100 data sheet, SXM: 312 TFLOP/s, 1555 and 2039 GB/s, NVLink 600 GB/s in both directions together.
        DeviceKind("a100-40gb", "cuda", "cuda", "hopper", 40e9, 312e12, 312e12, 1.555e12, 300e9, ("cuda",)),
        DeviceKind("a100-80gb", "cuda", "cuda", "hopper", 80e9, 312e12, 312e12, 2.039e12, 300e9, ("cuda",)),
        # NVIDIA DGX B200 data sheet, an eighth of it: 4.5 PFLOP/s with sparsity and 9 in float8, 8 TB/s, NVLink
        # 1800 GB/s in both directions together.
        DeviceKind(
            "b200-180gb",
            "cuda",
            "cuda",
            "hopper",
            180e9,
            2250e12,
            4500e12,
            8e12,
            900e9,
            ("cuda",),
            host_bytes_per_s=PCIE5,
        ),
        # NVIDIA L40S data sheet: 362 TFLOP/s, 733 in float8, 864 GB/s.
        DeviceKind("l40s-48gb", "cuda", "cuda", "hopper", 48e9, 362e12, 733e12, 0.864e12, 32e9, ("cuda",)),
        # NVIDIA Ada and RTX Blackwell architecture papers, appendices: products summed in float32, without sparsity.
        DeviceKind("rtx4090-24gb", "cuda", "cuda", "hopper", 24e9, 165.2e12, 330.3e12, 1.008e12, 32e9, ("cuda",)),
        DeviceKind(
            "rtx5090-32gb",
            "cuda",
            "cuda",
            "hopper",
            32e9,
            209.5e12,
            419e12,
            1.792e12,
            64e9,
            ("cuda",),
            host_bytes_per_s=PCIE5,
        ),
        DeviceKind(
            "rtx5080-16gb",
            "cuda",
            "cuda",
            "hopper",
            16e9,
            112.6e12,
            225e12,
            0.96e12,
            64e9,
            ("cuda",),
            host_bytes_per_s=PCIE5,
        ),
        DeviceKind("rtx4080-16gb", "cuda", "cuda", "hopper", 16e9, 97.5e12, 195e12, 0.717e12, 32e9, ("cuda",)),
        DeviceKind("rtx4070-12gb", "cuda", "cuda", "hopper", 12e9, 58.3e12, 117e12, 0.504e12, 32e9, ("cuda",)),
        DeviceKind(
            "rtxpro6000-96gb",
            "cuda",
            "cuda",
            "hopper",
            96e9,
            503e12,
            1006e12,
            1.792e12,
            64e9,
            ("cuda",),
            host_bytes_per_s=PCIE5,
        ),
        # NVIDIA GA102 architecture paper, appendix, and the RTX 3060's data sheet. No units for float8.
        DeviceKind("rtx3090-24gb", "cuda", "cuda", "hopper", 24e9, 71e12, 71e12, 0.936e12, 32e9, ("cuda",)),
        DeviceKind("rtx3060-12gb", "cuda", "cuda", "hopper", 12e9, 25.6e12, 25.6e12, 0.36e12, 32e9, ("cuda",)),
        # Google Cloud, TPU v6e: one core a chip, ICI 800 GB/s in both directions together.
        DeviceKind(
            "v6e",
            "tpu",
            "tpu",
            "trillium",
            32e9,
            918e12,
            918e12,
            1.638e12,
            400e9,
            ("TPU v6 lite", "TPU v6e"),
            V6E_LINKS,
        ),
        # Google Cloud, TPU v5p: 95 GB, 459 TFLOP/s, 2765 GB/s, ICI 1200 GB/s in both directions together.
        DeviceKind("v5p", "tpu", "tpu", "ironwood", 95e9, 459e12, 459e12, 2.765e12, 600e9, ("TPU v5", "TPU v5p")),
        # Google Cloud, TPU7x: 192 GB, 2307 TFLOP/s, 7380 GB/s, ICI 1200 GB/s a chip, of which a device is one half.
        DeviceKind("v7x", "tpu", "tpu", "ironwood", 96e9, 1153.5e12, 1153.5e12, 3.69e12, 300e9, ("TPU7x",), V7X_LINKS),
    )
}


UNREAD = (  # words of a device's name that do not tell its kind
    r"\b(nvidia|geforce|tesla|blackwell|workstation|server|edition|google|cloud)\b"
    r"|\b(tpu|gpu|hbm\w*|sxm\d?)\b"
)
CORES = {"v6e": 1, "v5p": 2}  # in a device, as names such as v5p-8 count them


def device_kind(name: str) -> DeviceKind:
    """The kind of a name in any spelling: h100, 4090, RTX-4090, "NVIDIA H100 80GB HBM3".

    Raises InputError.
    """
    found = _kinds(name)
    if len(found) == 1:
        return DEVICE_KINDS[found[0]]
    if found:
        raise InputError(f"--device-kind: {name!r} may be {' or '.join(found)}; choose one")
    if several := _several(name):
        kind, count = several
        advice = f"use --device-kind {kind} --devices {count}"
        raise InputError(f"--device-kind: {name!r} is {count} x {kind}; {advice}")
    names = {model: kind for kind in DEVICE_KINDS for model in _names(kind)}
    near = nearest(_model(name)[0], names)
    meant = f"; did you mean {names[near]}?" if near else ""
    known = ", ".join(DEVICE_KINDS)
    raise InputError(f"--device-kind: unknown {name[:80]!r}; known: {known}{meant}")


def _kinds(name: str) -> list[str]:
    """The kinds that the name may mean."""
    model, gigabytes = _model(name)
    named = [kind for kind in DEVICE_KINDS if model in _names(kind)]
    return [kind for kind in named if gigabytes in (None, DEVICE_KINDS[kind].memory_bytes / 1e9)]


def _model(name: str) -> tuple[str, int | None]:
    """Model and gigabytes of a device's name, without case, vendor and form: ("h100", 80)."""
    text = re.sub(UNREAD, "", name[:80].lower().replace("_", " "))
    memory = re.search(r"\b(\d+) ?g(i?b)?\b", text)
    text = text.replace(memory[0], "") if memory else text
    return re.sub("[^a-z0-9]", "", text).removeprefix("tpu"), int(memory[1]) if memory else None


def _names(kind: str) -> list[str]:
    """The models that a kind is known as: rtx4090 and 4090, v6e and what JAX calls it."""
    model = kind.partition("-")[0]
    found_as = [x for x in DEVICE_KINDS[kind].found_as if x != DEVICE_KINDS[kind].framework_kind]
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
    """The kind of a device by what its driver calls it, if its links are known: not those of a PCIe card (PCIe, NVL) of
    a kind that has NVLink."""
    name = name.lower().replace(" ", "")
    found = [
        kind
        for kind in DEVICE_KINDS.values()
        if kind.framework_kind == framework_kind and "pcie" not in name and "nvl" not in name
        and (kind.name.split("-")[0] in name or name in (x.lower().replace(" ", "") for x in kind.found_as))
    ]  # fmt: skip
    return min(found, key=lambda kind: abs(kind.memory_bytes - total_bytes), default=None)


GENERATIONS = {"v5p": ("v5p", 1), "v6e": ("v6e", 1), "tpu7x": ("v7x", 2)}  # libtpu's name -> kind, devices per chip


def topology(name: str) -> tuple[DeviceKind, int]:
    """The devices of a topology as libtpu names it, generation:chips along each axis, and their number."""
    generation, _, chips = name.partition(":")
    if generation not in GENERATIONS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", chips):
        known = ", ".join(GENERATIONS)
        raise InputError(f"--topology: {name!r}, expected GENERATION:CHIPS of {known}, such as v6e:2x4 or tpu7x:2x2x1")
    kind, cores = GENERATIONS[generation]
    return DEVICE_KINDS[kind], cores * math.prod(map(int, chips.split("x")))


# What a container sees of its own limits, in either version of the kernel's interface: limit, what is used, and which
# part of that are files that go when memory is wanted.
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of the host, or of its share that this process' container has; available is what can be
    had without swapping."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(FileNotFoundError), open("/proc/meminfo") as file:
        free = next((int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")), free)
    for folder, limit_file, used_file, cache in CGROUPS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, limit - used + int(stat[cache]))
            total = min(total, limit)
    return total, free
