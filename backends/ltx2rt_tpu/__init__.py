"""The JAX backend: TPUs, or the CPU."""

from ltx2rt_tpu.backend import TpuBackend

__all__ = ["TpuBackend"]
