"""Triton programs of bias_dropout_residual; the formulas are in ``oslo_engine.kernels.bias_dropout_residual``.

Four elements side by side share one call of Philox. Backward: each program takes every n-th tile of rows of its columns and
keeps its own sum for the bias, added up afterwards: no atomics, the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oslo_engine.kernels.dispatch import rows_of
from oslo_engine.kernels.gpu.launch import launch, num_programs, plain_tile


@triton.jit
def _kept(seed_ptr, rows, first_col, N, threshold, offset, COLS: tl.constexpr, ROWS: tl.constexpr):
    """Mask of a tile of [ROWS, COLS]."""
    groups = first_col // 4 + tl.arange(0, COLS // 4)
    counter = offset + rows[:, None] * ((N + 3) // 4) + groups[None, :]
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed_ptr), low, high, low * 0, low * 0)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, COLS])  # a b c d of each group side by side
    return bits.to(tl.uint32, bitcast=True) >= tl.full([1, 1], threshold, tl.uint32)


@triton.jit
def bias_dropout_residual_forward(
    x_ptr,
    b_ptr,
    r_ptr,
    seed_ptr,
    y_ptr,
    M,
    N,
    sx,
    sr,
    threshold,
    gain,
    offset,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DRAW: tl.constexpr,
    NOTHING: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    y = tl.zeros([ROWS, COLS], tl.float32)
    if not NOTHING:
        y = tl.load(x_ptr + rows[:, None] * sx + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if DRAW:
        y = tl.where(_kept(seed_ptr, rows, tl.program_id(1) * COLS, N, threshold, offset, COLS, ROWS), y * gain, 0.0)
    if RESIDUAL:
        y += tl.load(r_ptr + rows[:, None] * sr + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bias_dropout_residual_backward(
    dy_ptr,
    seed_ptr,
    dx_ptr,
    db_ptr,
    M,
    N,
    sdy,
    threshold,
    gain,
    offset,
    DRAW: tl.constexpr,
    NOTHING: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    db = tl.zeros([COLS], tl.float32)
    for first in range(program * ROWS, M, tl.num_programs(0) * ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        dx = tl.zeros([ROWS, COLS], tl.float32)
        if not NOTHING:
            dx = tl.load(dy_ptr + rows[:, None] * sdy + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if DRAW:
            dx = tl.where(_kept(seed_ptr, rows, tl.program_id(1) * COLS, N, threshold, offset, COLS, ROWS), dx * gain, 0.0)
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WANT_BIAS:
            db += tl.sum(dx, axis=0)
    if WANT_BIAS:
        tl.store(db_ptr + program.to(tl.int64) * N + cols, db, mask=cols < N)


def forward(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float, offset: int) -> Tensor:
    """residual + dropped(x + bias)."""
    x_rows, r_rows = rows_of(x), None if residual is None else rows_of(residual)
    M, N = x_rows.shape
    y = x.new_empty(x.shape, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    tile = plain_tile(max(N, 4))
    launch(
        bias_dropout_residual_forward,
        (triton.cdiv(M, tile.rows), triton.cdiv(N, tile.columns)),
        x,
        *(x_rows, None if bias is None else bias.contiguous(), r_rows, seed, y, M, N),
        *(x_rows.stride(0), 0 if r_rows is None else r_rows.stride(0), *_keeping(p), offset),
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        DRAW=0 < p < 1,
        NOTHING=p >= 1,
        ROWS=tile.rows,
        COLS=tile.columns,
        warps=tile.warps,
    )
    return y


def backward(dy: Tensor, seed: Tensor | None, p: float, offset: int, want_bias: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and bias."""
    dy_rows = rows_of(dy)
    M, N = dy_rows.shape
    dx = dy.new_empty(dy.shape)
    tile = plain_tile(max(N, 4), rows=4, longest=256)
    programs = num_programs(dy, triton.cdiv(M, tile.rows))
    db = dy.new_zeros((programs, N) if want_bias else (1, 0), dtype=torch.float32)
    launch(
        bias_dropout_residual_backward,
        (programs, triton.cdiv(N, tile.columns)),
        dy,
        *(dy_rows, seed, dx, db, M, N, dy_rows.stride(0), *_keeping(p), offset),
        DRAW=0 < p < 1,
        NOTHING=p >= 1,
        WANT_BIAS=want_bias,
        ROWS=tile.rows,
        COLS=tile.columns,
        warps=tile.warps,
    )
    return dx, db.sum(0)


def _keeping(p: float) -> tuple[int, float]:
    """From which random word on an element is kept, and what it is multiplied by."""
    return (int(p * 2**32), 1 / (1 - p)) if p < 1 else (0, 0.0)
