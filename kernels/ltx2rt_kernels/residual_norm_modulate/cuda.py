"""The row kernel of `norm_modulate` with a gated residual before it; `gated_residual` leaves the
norm out.

The residual may come before its bias is added, as under tensor parallelism, and lack the last
samples, as where the isolated branch has no cross-attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ltx2rt_kernels.norm_modulate.cuda import rows_launch
from ltx2rt_kernels.norm_modulate.cuda import why_not as why_not_rows


def why_not(
    x: Tensor, y: Tensor, *rows: Tensor, views, index_view=None, biased=False, eps=0.0
) -> str | None:
    if any(row.stride(-1) != 1 for row in (y, *rows[: 1 + biased])):
        return "an operand's last axis is strided"
    return why_not_rows(x, *rows[1 + biased :], index_view=index_view)


def gated_residual(
    x: Tensor, y: Tensor, *rows: Tensor, views, index_view=None, biased=False
) -> Tensor:
    return rows_launch(x, y, rows, views, index_view, 0, 0.0, biased)[0]


def residual_norm_modulate(
    x: Tensor, y: Tensor, *rows: Tensor, views, eps: float, index_view=None, biased=False, **written
) -> tuple[Any, ...]:
    """written: `quantised` and `unread` of `rows_launch`."""
    results = max(1, (len(views) - biased) // 2)
    return rows_launch(x, y, rows, views, index_view, results, eps, biased, **written)
