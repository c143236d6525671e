"""The table of ops as JAX functions of arrays and the op's arguments, and what many of them need.

Frequent ops are written in `lax`: jax.numpy traces a separate function for every new shape. float32
operands are multiplied in float32 (precision HIGHEST): a TPU's default rounds them to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Function = TypeVar("Function", bound=Callable[..., Any])
OPS: dict[str, Callable[..., Any]] = {}


def op(function: Function) -> Function:
    OPS[function.__name__.rstrip("_")] = function
    return function


def like(value: float, x: Array) -> np.ndarray:
    """A number of x's dtype, whatever the process takes Python's for."""
    return np.asarray(value, x.dtype)


def precision(x: Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
