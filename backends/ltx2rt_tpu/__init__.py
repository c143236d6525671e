"""The JAX backend: TPUs, or the CPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx2rt_tpu.module import as_nnx

__all__ = ["as_nnx"]


def __getattr__(name: str) -> Any:
    """Import `as_nnx` once it is asked for: the package's `factory` is to be had without jax."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from ltx2rt_tpu.module import as_nnx

    return as_nnx
