"""Hand-written kernels: a folder per operation with its numpy reference and its CUDA kernel in Triton."""
