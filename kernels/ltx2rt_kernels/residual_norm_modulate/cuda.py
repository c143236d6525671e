"""The row kernel of `norm_modulate` with a gated residual before it; `gated_residual` leaves the norm out."""

from __future__ import annotations

from torch import Tensor

from ltx2rt_kernels.launch import spread
from ltx2rt_kernels.norm_modulate.cuda import launch
from ltx2rt_kernels.norm_modulate.cuda import why_not as why_not_rows


def why_not(x: Tensor, y: Tensor, gate: Tensor, *rows: Tensor, gate_view, views=(), eps: float = 0.0) -> str | None:
    if y.stride(-1) != 1 or gate.stride(-1) != 1:
        return "an operand's last axis is strided"
    return why_not_rows(x, *rows)


def gated_residual(x: Tensor, y: Tensor, gate: Tensor, *, gate_view) -> Tensor:
    return launch(x, (y, spread(gate, gate_view, x.shape)), [], 0, 0.0)[0]


def residual_norm_modulate(x: Tensor, y: Tensor, gate: Tensor, *rows: Tensor, gate_view, views, eps: float):
    spread_rows = [spread(row, view, x.shape) for row, view in zip(rows, views, strict=True)]
    residual = (y, spread(gate, gate_view, x.shape))
    return tuple(launch(x, residual, spread_rows, max(1, len(rows) // 2), eps))
