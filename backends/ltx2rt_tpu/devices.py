"""TPUs by Google Cloud's figures. JAX multiplies numbers of 8 bits as bfloat16 ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ltx2rt.placement.devices import DeviceKind, Sustained

COLLECTIVE_S = 2e-6  # fixed latency of a collective; assumed, not measured
# An ICI link brings 90 GB/s (JAX scaling book). Neighbours on a v6e 2x4, which has no wrap, and on
# the chips of two devices of a v7x 2x2x1: a pair has one link, or is on one chip; a line of 4
# passes half of an all-to-all of its pairs through the middle; 8 have two links on v6e, a v7x
# chip's devices have one each.
V6E_NAMES = ("TPU v6 lite", "TPU v6e", "Trillium")
V6E_LINKS = {2: (90e9, 90e9), 4: (67.5e9, 90e9), 8: (79e9, 180e9)}
V7X_LINKS = {2: (300e9, 300e9), 4: (67.5e9, 90e9), 8: (79e9, 90e9)}


def _compiled(
    on: str, products: float, attention: float, neighbourhood: float, moved: float
) -> Sustained:
    """Shares by the compiler's code. What the host does in a request is not in it."""
    nothing = {"launch_s": 0, "result_bytes_per_s": math.inf, "reload_s": 0, "request_s": 0}
    # The last: a vocoder's convolutions, which float32 multiplies six times, with all that its
    # activations take; the code of 320 mel frames takes 43 ms on v6e, 36 ms on v7x.
    kernels = {
        "neighbourhood": neighbourhood, "attention": attention, "float32 over time": 0.0185
    }  # fmt: skip
    return Sustained(
        on, products, products, kernels, 1.0, moved=moved, exposed=0.4, compiled=True, **nothing
    )


# By `ltx2rt compile --times` of LTX-2.5's distilled steps and decoder at 1920x1088x121,
# on the chips' own meshes (docs/tpus.md). The share of neighbourhoods holds for the whole decoder:
# its narrow products, too, reach less than a transformer's.
COMPILED = (
    _compiled("v6e", 0.68, 0.56, 0.063, 0.43),
    _compiled("v7x", 0.87, 0.655, 0.082, 0.91),
)


def _tpu(
    name: str,
    profile: str,
    size: float,
    flops: float,
    memory: float,
    link: float,
    found_as: tuple[str, ...],
    neighbours: Mapping[int, tuple[float, float]] | None = None,
) -> DeviceKind:
    """A row of `KINDS`; size in bytes, rates in FLOP/s and bytes/s."""
    return DeviceKind(
        name, "tpu", "tpu", profile, size, flops, flops, memory, link, COLLECTIVE_S, found_as, neighbours or {},
        sustained=next((one for one in COMPILED if one.on == name), None),
    )  # fmt: skip


KINDS = (
    # TPU v5e: 16 GB, 197 TFLOP/s, 819 GB/s, ICI 400 GB/s in both directions together.
    _tpu("v5e", "trillium", 16e9, 197e12, 0.819e12, 200e9, ("TPU v5 lite", "TPU v5e")),
    # TPU v6e: one core a chip, ICI 800 GB/s in both directions together.
    _tpu("v6e", "trillium", 32e9, 918e12, 1.638e12, 400e9, V6E_NAMES, V6E_LINKS),
    # TPU v5p: 95 GB, 459 TFLOP/s, 2765 GB/s, ICI 1200 GB/s in both directions together.
    _tpu("v5p", "ironwood", 95e9, 459e12, 2.765e12, 600e9, ("TPU v5", "TPU v5p")),
    # TPU7x: 192 GB, 2307 TFLOP/s, 7380 GB/s, ICI 1200 GB/s a chip, of which a device is one half.
    _tpu("v7x", "ironwood", 96e9, 1153.5e12, 3.69e12, 300e9, ("TPU7x", "Ironwood"), V7X_LINKS),
)
