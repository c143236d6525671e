"""The JAX backend: TPUs, or the CPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ltx2rt_tpu.backend import TpuBackend
    from ltx2rt_tpu.module import as_nnx

__all__ = ["TpuBackend", "as_nnx"]
HOMES = {"TpuBackend": "backend", "as_nnx": "module"}


def __getattr__(name: str) -> Any:
    """The package's `factory` is to be had without jax, and all but `as_nnx` without flax."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"ltx2rt_tpu.{HOMES[name]}"), name)
