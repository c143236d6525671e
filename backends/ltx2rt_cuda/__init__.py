"""The PyTorch backend: NVIDIA GPUs, or the CPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx2rt_cuda.module import as_module

__all__ = ["as_module"]


def __getattr__(name: str) -> Any:
    """Import `as_module` once it is asked for: the package's `factory` is to be had without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from ltx2rt_cuda.module import as_module

    return as_module
