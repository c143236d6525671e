"""The PyTorch backend: NVIDIA GPUs, or the CPU."""

from ltx2rt_cuda.backend import CudaBackend
from ltx2rt_cuda.module import as_module

__all__ = ["CudaBackend", "as_module"]
