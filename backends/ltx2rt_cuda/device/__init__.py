"""The devices that PyTorch computes on: the only files of this backend that call `torch.cuda`.

Another device is a class derived from `TorchDevice` and a row of DEVICES.
"""

from __future__ import annotations

from torch import Tensor

from ltx2rt.errors import InputError
from ltx2rt_cuda.device.cuda import Cuda
from ltx2rt_cuda.device.torch_device import HOST, TorchDevice

DEVICES: dict[str, TorchDevice] = {"cuda": Cuda(), "cpu": HOST}  # by torch's type of device


def device_of(x: Tensor) -> TorchDevice:
    """The device that `x` is on."""
    return DEVICES.get(x.device.type, HOST)


def chosen(name: str) -> TorchDevice:
    """The device of this name; "auto": the first that is here. Raises InputError."""
    if name != "auto" and name not in DEVICES:
        *others, last = ["auto", *DEVICES]
        raise InputError(f"backend cuda runs on {', '.join(others)} or {last}, not on {name}")
    if name == "auto":
        return next(device for device in DEVICES.values() if device.is_here())
    if not DEVICES[name].is_here():
        raise InputError(
            f"no {name.upper()} device was found; use --device cpu, or --device auto to fall back "
            "by itself"
        )
    return DEVICES[name]
