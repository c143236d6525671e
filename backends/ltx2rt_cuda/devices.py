"""NVIDIA GPUs by the figures of their data sheets.

FP8 products of an A100 or an RTX 30 run at the rate of bfloat16: they have no units for FP8.
Cards without NVLink receive over PCIe: 32 GB/s of generation 4, 64 GB/s of generation 5.
"""

from __future__ import annotations

from typing import Any

from ltx2rt.placement.devices import PCIE4, PCIE5, DeviceKind, Sustained

COLLECTIVE_S = 10e-6  # fixed latency of a collective; assumed, not measured

# Memory of a GPU that PyTorch's pools, cuBLAS's and cuDNN's workspaces and fragmentation take from
# a run's share.
RESERVE: dict[str, Any] = {"reserve_bytes": 3_000_000_000, "reserve_share": 0.02}

# Measured on one H200 (docs/gpus.md) with LTX-2.3 at 768x512x121; tests/run/test_estimate.py
# compares requests. Its 700 W limit products.
SUSTAINED = Sustained(
    "h200-141gb",
    products=0.687,  # 680 TFLOP/s
    quantised=0.581,  # 1150, with quantising rows
    kernels={"attention": 0.505},  # 500, cuDNN's
    memory=0.604,  # 2.9 TB/s
    launch_s=60e-6,
    result_bytes_per_s=2.2e9,
    reload_s=0.14,
    request_s=0.1,
)


def _gpu(
    name: str, flops: float, quantised_flops: float, memory: float, link: float, host: float = PCIE4
) -> DeviceKind:
    """A row of `KINDS`; rates are in FLOP/s and bytes/s, the memory's size comes from the name."""
    memory_bytes = 1e9 * int(name.rpartition("-")[2].removesuffix("gb"))
    return DeviceKind(
        name, "cuda", "cuda", "hopper", memory_bytes, flops, quantised_flops, memory, link,
        COLLECTIVE_S, ("cuda",),
        host_bytes_per_s=host, sustained=SUSTAINED, **RESERVE,
    )  # fmt: skip


# NVIDIA H100 data sheet, SXM: 1979 TFLOP/s with sparsity and 3958 in FP8, NVLink 900 GB/s in
# both directions together.
H100 = _gpu("h100-80gb", 989.5e12, 1979e12, 3.35e12, 450e9, PCIE5)
KINDS = (
    H100,
    # NVIDIA H200 data sheet, SXM: the same chip and links with other memory. Copies from pinned
    # memory were measured.
    _gpu("h200-141gb", 989.5e12, 1979e12, 4.8e12, 450e9, 53e9),
    # NVIDIA A100 data sheet, SXM: 312 TFLOP/s, 1555 and 2039 GB/s, NVLink 600 GB/s in both
    # directions together.
    _gpu("a100-40gb", 312e12, 312e12, 1.555e12, 300e9),
    _gpu("a100-80gb", 312e12, 312e12, 2.039e12, 300e9),
    # NVIDIA DGX B200 data sheet, an eighth of it: 4.5 PFLOP/s with sparsity and 9 in FP8, 8
    # TB/s, NVLink 1800 GB/s in both directions together.
    _gpu("b200-180gb", 2250e12, 4500e12, 8e12, 900e9, PCIE5),
    # NVIDIA L40S data sheet: 362 TFLOP/s, 733 in FP8, 864 GB/s.
    _gpu("l40s-48gb", 362e12, 733e12, 0.864e12, 32e9),
    # NVIDIA Ada and RTX Blackwell architecture papers, appendices: products summed in float32,
    # without sparsity.
    _gpu("rtx4090-24gb", 165.2e12, 330.3e12, 1.008e12, 32e9),
    _gpu("rtx5090-32gb", 209.5e12, 419e12, 1.792e12, 64e9, PCIE5),
    _gpu("rtx5080-16gb", 112.6e12, 225e12, 0.96e12, 64e9, PCIE5),
    _gpu("rtx4080-16gb", 97.5e12, 195e12, 0.717e12, 32e9),
    _gpu("rtx4070-12gb", 58.3e12, 117e12, 0.504e12, 32e9),
    _gpu("rtxpro6000-96gb", 503e12, 1006e12, 1.792e12, 64e9, PCIE5),
    # NVIDIA GA102 architecture paper, appendix, and the RTX 3060's data sheet.
    _gpu("rtx3090-24gb", 71e12, 71e12, 0.936e12, 32e9),
    _gpu("rtx3060-12gb", 25.6e12, 25.6e12, 0.36e12, 32e9),
)
