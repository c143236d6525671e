"""The PyTorch backend: NVIDIA GPUs, or the CPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx2rt_cuda.backend import CudaBackend
    from ltx2rt_cuda.module import as_module

__all__ = ["CudaBackend", "as_module"]


def __getattr__(name: str) -> Any:
    """The package's `factory` is to be had without torch."""
    if name == "CudaBackend":
        from ltx2rt_cuda.backend import CudaBackend

        return CudaBackend
    if name == "as_module":
        from ltx2rt_cuda.module import as_module

        return as_module
    raise AttributeError(f"module {__name__} has no attribute {name}")
