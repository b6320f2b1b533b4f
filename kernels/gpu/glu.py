"""Triton programs of glu; the formulas are in ``oslo_engine.kernels.glu``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from oslo_engine.kernels.dispatch import rows_of
from oslo_engine.kernels.gpu.activation import activation, activation_and_slope
from oslo_engine.kernels.gpu.launch import launch, plain_tile


@triton.jit
def glu_forward(g_ptr, u_ptr, y_ptr, M, N, sg, su, FORM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    gate = tl.load(g_ptr + rows[:, None] * sg + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    up = tl.load(u_ptr + rows[:, None] * su + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    y = activation(gate, FORM) * up
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def glu_backward(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, M, N, sdy, sg, su, FORM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    dy = tl.load(dy_ptr + rows[:, None] * sdy + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(g_ptr + rows[:, None] * sg + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    up = tl.load(u_ptr + rows[:, None] * su + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    active, slope = activation_and_slope(gate, FORM)
    at = rows[:, None] * N + cols[None, :]
    tl.store(dg_ptr + at, (dy * up * slope).to(dg_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + at, (dy * active).to(du_ptr.dtype.element_ty), mask=mask)


def forward(gate: Tensor, up: Tensor, form: str) -> Tensor:
    """activation(gate) * up."""
    g_rows, u_rows = rows_of(gate), rows_of(up)
    M, N = g_rows.shape
    y = gate.new_empty(gate.shape)
    tile = plain_tile(N)
    launch(
        glu_forward,
        (triton.cdiv(M, tile.rows), triton.cdiv(N, tile.columns)),
        gate,
        *(g_rows, u_rows, y, M, N, g_rows.stride(0), u_rows.stride(0)),
        FORM=form,
        ROWS=tile.rows,
        COLS=tile.columns,
        warps=tile.warps,
    )
    return y


def backward(dy: Tensor, gate: Tensor, up: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    dy_rows, g_rows, u_rows = rows_of(dy), rows_of(gate), rows_of(up)
    M, N = g_rows.shape
    dgate, dup = (gate.new_empty(gate.shape) for _ in range(2))
    tile = plain_tile(N)
    launch(
        glu_backward,
        (triton.cdiv(M, tile.rows), triton.cdiv(N, tile.columns)),
        gate,
        *(dy_rows, g_rows, u_rows, dgate, dup, M, N, dy_rows.stride(0), g_rows.stride(0), u_rows.stride(0)),
        FORM=form,
        ROWS=tile.rows,
        COLS=tile.columns,
        warps=tile.warps,
    )
    return dgate, dup
