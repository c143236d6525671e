"""The row kernel of `norm_modulate` with a gated residual before it; `gated_residual` leaves the norm out.

From memory it moves the minimum but for rows, which all tokens but the first read from the cache: x and y once, the sum
and each result once.
"""

from __future__ import annotations

from torch import Tensor

from ltx2rt_kernels.norm_modulate.cuda import launch
from ltx2rt_kernels.norm_modulate.cuda import why_not as why_not_rows


def why_not(x: Tensor, y: Tensor, gate: Tensor, *rows: Tensor, views, index_view=None, eps=0.0) -> str | None:
    if y.stride(-1) != 1 or gate.stride(-1) != 1:
        return "an operand's last axis is strided"
    return why_not_rows(x, *rows, index_view=index_view)


def gated_residual(x: Tensor, y: Tensor, *gate: Tensor, views, index_view=None) -> Tensor:
    return launch(x, y, gate, views, index_view, 0, 0.0)[0]


def residual_norm_modulate(x: Tensor, y: Tensor, *rows: Tensor, views, eps: float, index_view=None):
    return tuple(launch(x, y, rows, views, index_view, max(1, len(views) // 2), eps))
