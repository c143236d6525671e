"""The JAX backend: TPUs, or the CPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx2rt_tpu.backend import TpuBackend
    from ltx2rt_tpu.module import as_nnx

__all__ = ["TpuBackend", "as_nnx"]


def __getattr__(name: str) -> Any:
    """The package's `factory` is to be had without jax, and all but `as_nnx` without flax."""
    if name == "TpuBackend":
        from ltx2rt_tpu.backend import TpuBackend

        return TpuBackend
    if name == "as_nnx":
        from ltx2rt_tpu.module import as_nnx

        return as_nnx
    raise AttributeError(f"module {__name__} has no attribute {name}")
