"""Triton programs of bias_gelu; the formulas are in ``oslo_engine.kernels.bias_gelu``.

Backward: each program takes every n-th tile of rows of its columns and keeps its own sum for the bias, added up afterwards: no
atomics, the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oslo_engine.kernels.dispatch import rows_of
from oslo_engine.kernels.gpu.activation import activation, activation_and_slope
from oslo_engine.kernels.gpu.launch import launch, num_programs, plain_tile


@triton.jit
def bias_gelu_forward(
    x_ptr, b_ptr, y_ptr, M, N, sx, BIAS: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    x = tl.load(x_ptr + rows[:, None] * sx + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], activation(x, FORM).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bias_gelu_backward(
    dy_ptr,
    x_ptr,
    b_ptr,
    dx_ptr,
    db_ptr,
    M,
    N,
    sdy,
    sx,
    BIAS: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    bias = tl.zeros([COLS], tl.float32)
    if BIAS:
        bias = tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    db = tl.zeros([COLS], tl.float32)
    for first in range(program * ROWS, M, tl.num_programs(0) * ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        x = tl.load(x_ptr + rows[:, None] * sx + cols[None, :], mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * sdy + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        _, slope = activation_and_slope(x, FORM)
        dx = dy * slope
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WANT_BIAS:
            db += tl.sum(dx, axis=0)
    if WANT_BIAS:
        tl.store(db_ptr + program.to(tl.int64) * N + cols, db, mask=cols < N)


def forward(x: Tensor, bias: Tensor | None, form: str) -> Tensor:
    """gelu(x + bias)."""
    x_rows = rows_of(x)
    M, N = x_rows.shape
    y = x.new_empty(x.shape)
    tile = plain_tile(N)
    launch(
        bias_gelu_forward,
        (triton.cdiv(M, tile.rows), triton.cdiv(N, tile.columns)),
        x,
        *(x_rows, None if bias is None else bias.contiguous(), y, M, N, x_rows.stride(0)),
        BIAS=bias is not None,
        FORM=form,
        ROWS=tile.rows,
        COLS=tile.columns,
        warps=tile.warps,
    )
    return y


def backward(dy: Tensor, x: Tensor, bias: Tensor | None, form: str, want_bias: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and bias."""
    dy_rows, x_rows = rows_of(dy), rows_of(x)
    M, N = x_rows.shape
    dx = x.new_empty(x.shape)
    tile = plain_tile(N, rows=4, longest=256)
    blocks = triton.cdiv(N, tile.columns)
    programs = num_programs(x, triton.cdiv(M, tile.rows))
    db = x.new_zeros((programs, N) if want_bias else (1, 0), dtype=torch.float32)
    launch(
        bias_gelu_backward,
        (programs, blocks),
        x,
        *(dy_rows, x_rows, None if bias is None else bias.contiguous(), dx, db, M, N, dy_rows.stride(0), x_rows.stride(0)),
        BIAS=bias is not None,
        WANT_BIAS=want_bias,
        FORM=form,
        ROWS=tile.rows,
        COLS=tile.columns,
        warps=tile.warps,
    )
    return dx, db.sum(0)
