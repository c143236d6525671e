"""Each op of the table as a torch function; a module for each subject enters its own."""

from ltx2rt_cuda.ops import arrays, attention, convolutions, exchanges, norms, products, stored  # noqa: F401
from ltx2rt_cuda.ops.table import OPS

__all__ = ["OPS", "WITH_KERNEL"]
WITH_KERNEL = tuple(name for name, run in OPS.items() if hasattr(run, "__wrapped__"))
