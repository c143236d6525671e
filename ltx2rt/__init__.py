"""ltx2rt: one model graph of LTX-2, lowered to PyTorch and to JAX."""

__version__ = "0.1.0"
