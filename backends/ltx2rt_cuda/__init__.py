"""The PyTorch backend: NVIDIA GPUs, or the CPU."""

from ltx2rt_cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
