"""The PyTorch backend: NVIDIA GPUs, or the CPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx2rt_cuda.backend import CudaBackend
    from ltx2rt_cuda.module import as_module

__all__ = ["CudaBackend", "as_module"]
HOMES = {"CudaBackend": "backend", "as_module": "module"}


def __getattr__(name: str) -> Any:
    """The package's `factory` is to be had without torch."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"ltx2rt_cuda.{HOMES[name]}"), name)
