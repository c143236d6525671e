"""Hand-written kernels: a folder per operation, with its CUDA kernel in Triton or its TPU kernel in
Pallas."""
