"""The devices that PyTorch computes on: the only files of this backend that call `torch.cuda`.

Another device is a class derived from `TorchDevice` and a row of DEVICES.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from ltx2rt.errors import InputError
from ltx2rt.notes import note
from ltx2rt_cuda.device.cuda import Cuda
from ltx2rt_cuda.device.torch_device import HOST, TorchDevice

DEVICES: dict[str, TorchDevice] = {"cuda": Cuda(), "cpu": HOST}  # by torch's type of device


def device_of(x: Tensor) -> TorchDevice:
    """The device that `x` is on."""
    return DEVICES.get(x.device.type, HOST)


def unused(devices: Path) -> str:
    """Why PyTorch uses no GPU of NVIDIA or AMD that has files in `devices`; "" if none has."""
    version, visible = torch.__version__, os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.hip or (not torch.version.cuda and (devices / "kfd").exists()):
        return "AMD GPUs are not supported"
    if visible is not None or not any(devices.glob("nvidia[0-9]*")):
        return ""
    if torch.version.cuda:
        return (
            f"PyTorch {version} finds no driver for the NVIDIA GPU here; see what nvidia-smi says"
        )
    return (
        f"an NVIDIA GPU is here, but PyTorch {version} is a build for CPUs; install one for CUDA "
        f"(on Linux: pip install --force-reinstall torch=={version.partition('+')[0]})"
    )


def chosen(name: str) -> TorchDevice:
    """The device of this name; "auto": the first that is here. Raises InputError."""
    if name != "auto" and name not in DEVICES:
        *others, last = ["auto", *DEVICES]
        raise InputError(f"backend cuda runs on {', '.join(others)} or {last}, not on {name}")
    if name == "auto":
        found = next(device for device in DEVICES.values() if device.is_here())
        if found is HOST and (reason := unused(Path("/dev"))):
            note(reason)
        return found
    if not DEVICES[name].is_here():
        reason = unused(Path("/dev")) or f"no {name.upper()} device was found"
        raise InputError(f"{reason}; use --device cpu, or --device auto to fall back by itself")
    return DEVICES[name]
