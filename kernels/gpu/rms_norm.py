"""Triton programs of rms_norm; the formulas are in ``oslo_engine.kernels.rms_norm``.

Forward reads a row once (rows longer than a tile twice). Backward: each program takes every n-th tile of rows and keeps its own
sum for the weight, added up afterwards: no atomics, the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oslo_engine.kernels.dispatch import rows_of
from oslo_engine.kernels.gpu.launch import launch, num_programs, row_tile


@triton.jit
def _read(x_ptr, r_ptr, h_ptr, rows, cols, sx, sr, mask, ADD: tl.constexpr):
    x = tl.load(x_ptr + rows[:, None] * sx + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(r_ptr + rows[:, None] * sr + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = x.to(h_ptr.dtype.element_ty).to(tl.float32)  # what is stored is what is normalised
    return x


@triton.jit
def _write(y_ptr, w_ptr, normed, shift, rows, cols, mask, N, WEIGHT: tl.constexpr):
    if WEIGHT:
        weight = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + shift
        normed *= weight[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], normed.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_forward(
    x_ptr,
    r_ptr,
    w_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    M,
    N,
    sx,
    sr,
    eps,
    shift,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    if WHOLE:
        mask = (rows[:, None] < M) & (cols[None, :] < N)
        h = _read(x_ptr, r_ptr, h_ptr, rows, cols, sx, sr, mask, ADD)
        if ADD:
            tl.store(h_ptr + rows[:, None] * N + cols[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)
        rstd = tl.rsqrt(tl.sum(h * h, axis=1) / N + eps)
        _write(y_ptr, w_ptr, h * rstd[:, None], shift, rows, cols, mask, N, WEIGHT)
    else:
        squares = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, N, COLS):
            at = start + cols
            mask = (rows[:, None] < M) & (at[None, :] < N)
            h = _read(x_ptr, r_ptr, h_ptr, rows, at, sx, sr, mask, ADD)
            if ADD:
                tl.store(h_ptr + rows[:, None] * N + at[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)
            squares += h * h
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)
        for start in range(0, N, COLS):
            at = start + cols
            mask = (rows[:, None] < M) & (at[None, :] < N)
            h = _read(x_ptr, r_ptr, h_ptr, rows, at, sx, sr, mask, ADD)
            _write(y_ptr, w_ptr, h * rstd[:, None], shift, rows, at, mask, N, WEIGHT)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


@triton.jit
def _read_gradient(dy_ptr, h_ptr, w_ptr, rstd, shift, rows, cols, sdy, sh, mask, N, WEIGHT: tl.constexpr):
    """dy, the normalised h, and dy * (shift + weight)."""
    dy = tl.load(dy_ptr + rows[:, None] * sdy + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + rows[:, None] * sh + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    grad = dy
    if WEIGHT:
        weight = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + shift
        grad = dy * weight[None, :]
    return dy, h * rstd[:, None], grad


@triton.jit
def _write_gradient(dx_ptr, dh_ptr, dx, rows, cols, sdh, mask, N, DH: tl.constexpr):
    if DH:
        dx += tl.load(dh_ptr + rows[:, None] * sdh + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward(
    dy_ptr,
    dh_ptr,
    h_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    M,
    N,
    sdy,
    sdh,
    sh,
    shift,
    WEIGHT: tl.constexpr,
    DH: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.arange(0, COLS)
    dw_row = dw_ptr + program.to(tl.int64) * N
    dw = tl.zeros([COLS], tl.float32)
    for first in range(program * ROWS, M, tl.num_programs(0) * ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        if WHOLE:
            mask = (rows[:, None] < M) & (cols[None, :] < N)
            dy, normed, grad = _read_gradient(dy_ptr, h_ptr, w_ptr, rstd, shift, rows, cols, sdy, sh, mask, N, WEIGHT)
            along = tl.sum(grad * normed, axis=1) / N
            _write_gradient(dx_ptr, dh_ptr, rstd[:, None] * (grad - normed * along[:, None]), rows, cols, sdh, mask, N, DH)
            if WANT_WEIGHT:
                dw += tl.sum(dy * normed, axis=0)
        else:
            sums = tl.zeros([ROWS, COLS], tl.float32)
            for start in range(0, N, COLS):
                at = start + cols
                mask = (rows[:, None] < M) & (at[None, :] < N)
                dy, normed, grad = _read_gradient(dy_ptr, h_ptr, w_ptr, rstd, shift, rows, at, sdy, sh, mask, N, WEIGHT)
                sums += grad * normed
            along = tl.sum(sums, axis=1) / N
            for start in range(0, N, COLS):
                at = start + cols
                mask = (rows[:, None] < M) & (at[None, :] < N)
                dy, normed, grad = _read_gradient(dy_ptr, h_ptr, w_ptr, rstd, shift, rows, at, sdy, sh, mask, N, WEIGHT)
                _write_gradient(dx_ptr, dh_ptr, rstd[:, None] * (grad - normed * along[:, None]), rows, at, sdh, mask, N, DH)
                if WANT_WEIGHT:  # too many sums for registers: they live in this program's own row of the buffer
                    piece = tl.load(dw_row + at, mask=at < N, other=0.0) + tl.sum(dy * normed, axis=0)
                    tl.store(dw_row + at, piece, mask=at < N)
            tl.debug_barrier()
    if WANT_WEIGHT and WHOLE:
        tl.store(dw_row + cols, dw, mask=cols < N)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, shift: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, h (empty without a residual), 1 / root mean square."""
    x_rows, r_rows = rows_of(x), None if residual is None else rows_of(residual)
    (M, N), dtype = x_rows.shape, x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    h = x.new_empty(x.shape if residual is not None else 0, dtype=dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    tile = row_tile(N)
    launch(
        rms_norm_forward,
        (triton.cdiv(M, tile.rows),),
        x,
        *(x_rows, r_rows, None if weight is None else weight.contiguous(), y, h, rstd),
        *(M, N, x_rows.stride(0), 0 if r_rows is None else r_rows.stride(0), eps, shift),
        ADD=residual is not None,
        WEIGHT=weight is not None,
        ROWS=tile.rows,
        COLS=tile.columns,
        WHOLE=tile.whole,
        warps=tile.warps,
    )
    return y, h, rstd


def backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor, shift: float, want_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of h and weight."""
    dy_rows, h_rows, dh_rows = rows_of(dy), rows_of(h), None if dh is None else rows_of(dh)
    M, N = h_rows.shape
    dx = h.new_empty(h.shape)
    tile = row_tile(N)
    programs = num_programs(h, triton.cdiv(M, tile.rows))
    dw = rstd.new_zeros((programs, N) if want_weight else (1, 0))
    launch(
        rms_norm_backward,
        (programs,),
        h,
        *(dy_rows, dh_rows, h_rows, None if weight is None else weight.contiguous(), rstd, dx, dw),
        *(M, N, dy_rows.stride(0), 0 if dh_rows is None else dh_rows.stride(0), h_rows.stride(0), shift),
        WEIGHT=weight is not None,
        DH=dh is not None,
        WANT_WEIGHT=want_weight,
        ROWS=tile.rows,
        COLS=tile.columns,
        WHOLE=tile.whole,
        warps=tile.warps,
    )
    return dx, dw.sum(0)
