"""The JAX backend: TPUs, or the CPU."""

from typing import TYPE_CHECKING, Any

from ltx2rt_tpu.backend import TpuBackend

if TYPE_CHECKING:
    from ltx2rt_tpu.module import as_nnx

__all__ = ["TpuBackend", "as_nnx"]


def __getattr__(name: str) -> Any:
    """`as_nnx` brings flax, which nothing else needs."""
    if name == "as_nnx":
        from ltx2rt_tpu.module import as_nnx

        return as_nnx
    raise AttributeError(f"module {__name__} has no attribute {name}")
