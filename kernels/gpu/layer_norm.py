"""Triton programs of layer_norm; the formulas are in ``oslo_engine.kernels.layer_norm``.

Forward reads a row once (rows longer than a tile three times). Backward: each program takes every n-th tile of rows and keeps
its own sums for weight and bias, added up afterwards: no atomics, the same bits every time.
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
def _write(y_ptr, w_ptr, b_ptr, normed, rows, cols, mask, N, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    if WEIGHT:
        normed *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        normed += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], normed.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_forward(
    x_ptr,
    r_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    h_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    N,
    sx,
    sr,
    eps,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
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
        mean = tl.sum(h, axis=1) / N
        centred = tl.where(cols[None, :] < N, h - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / N + eps)
        _write(y_ptr, w_ptr, b_ptr, centred * rstd[:, None], rows, cols, mask, N, WEIGHT, BIAS)
    else:
        summed = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, N, COLS):
            at = start + cols
            mask = (rows[:, None] < M) & (at[None, :] < N)
            h = _read(x_ptr, r_ptr, h_ptr, rows, at, sx, sr, mask, ADD)
            if ADD:
                tl.store(h_ptr + rows[:, None] * N + at[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)
            summed += h
        mean = tl.sum(summed, axis=1) / N
        squares = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, N, COLS):
            at = start + cols
            mask = (rows[:, None] < M) & (at[None, :] < N)
            h = _read(x_ptr, r_ptr, h_ptr, rows, at, sx, sr, mask, ADD)
            centred = tl.where(at[None, :] < N, h - mean[:, None], 0.0)
            squares += centred * centred
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)
        for start in range(0, N, COLS):
            at = start + cols
            mask = (rows[:, None] < M) & (at[None, :] < N)
            h = _read(x_ptr, r_ptr, h_ptr, rows, at, sx, sr, mask, ADD)
            _write(y_ptr, w_ptr, b_ptr, (h - mean[:, None]) * rstd[:, None], rows, at, mask, N, WEIGHT, BIAS)
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


@triton.jit
def _read_gradient(dy_ptr, h_ptr, w_ptr, mean, rstd, rows, cols, sdy, sh, mask, N, WEIGHT: tl.constexpr):
    """dy, the normalised h, and dy * weight."""
    dy = tl.load(dy_ptr + rows[:, None] * sdy + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + rows[:, None] * sh + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    normed = tl.where(mask, (h - mean[:, None]) * rstd[:, None], 0.0)
    grad = dy
    if WEIGHT:
        grad = dy * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    return dy, normed, grad


@triton.jit
def _write_gradient(dx_ptr, dh_ptr, dx, rows, cols, sdh, mask, N, DH: tl.constexpr):
    if DH:
        dx += tl.load(dh_ptr + rows[:, None] * sdh + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_backward(
    dy_ptr,
    dh_ptr,
    h_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    M,
    N,
    sdy,
    sdh,
    sh,
    WEIGHT: tl.constexpr,
    DH: tl.constexpr,
    PARAMETERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.arange(0, COLS)
    dw_row = dw_ptr + program.to(tl.int64) * N
    db_row = db_ptr + program.to(tl.int64) * N
    dw = tl.zeros([COLS], tl.float32)
    db = tl.zeros([COLS], tl.float32)
    for first in range(program * ROWS, M, tl.num_programs(0) * ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        if WHOLE:
            mask = (rows[:, None] < M) & (cols[None, :] < N)
            dy, normed, grad = _read_gradient(dy_ptr, h_ptr, w_ptr, mean, rstd, rows, cols, sdy, sh, mask, N, WEIGHT)
            along = tl.sum(grad * normed, axis=1) / N
            shift = tl.sum(grad, axis=1) / N
            dx = rstd[:, None] * (grad - shift[:, None] - normed * along[:, None])
            _write_gradient(dx_ptr, dh_ptr, dx, rows, cols, sdh, mask, N, DH)
            if PARAMETERS:
                dw += tl.sum(dy * normed, axis=0)
                db += tl.sum(dy, axis=0)
        else:
            sum_along = tl.zeros([ROWS, COLS], tl.float32)
            sum_shift = tl.zeros([ROWS, COLS], tl.float32)
            for start in range(0, N, COLS):
                at = start + cols
                mask = (rows[:, None] < M) & (at[None, :] < N)
                dy, normed, grad = _read_gradient(dy_ptr, h_ptr, w_ptr, mean, rstd, rows, at, sdy, sh, mask, N, WEIGHT)
                sum_along += grad * normed
                sum_shift += grad
            along = tl.sum(sum_along, axis=1) / N
            shift = tl.sum(sum_shift, axis=1) / N
            for start in range(0, N, COLS):
                at = start + cols
                mask = (rows[:, None] < M) & (at[None, :] < N)
                dy, normed, grad = _read_gradient(dy_ptr, h_ptr, w_ptr, mean, rstd, rows, at, sdy, sh, mask, N, WEIGHT)
                dx = rstd[:, None] * (grad - shift[:, None] - normed * along[:, None])
                _write_gradient(dx_ptr, dh_ptr, dx, rows, at, sdh, mask, N, DH)
                if PARAMETERS:  # too many sums for registers: they live in this program's own row of the buffers
                    piece_w = tl.load(dw_row + at, mask=at < N, other=0.0) + tl.sum(dy * normed, axis=0)
                    piece_b = tl.load(db_row + at, mask=at < N, other=0.0) + tl.sum(dy, axis=0)
                    tl.store(dw_row + at, piece_w, mask=at < N)
                    tl.store(db_row + at, piece_b, mask=at < N)
            tl.debug_barrier()
    if PARAMETERS and WHOLE:
        tl.store(dw_row + cols, dw, mask=cols < N)
        tl.store(db_row + cols, db, mask=cols < N)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, h (empty without a residual), mean, 1 / deviation."""
    x_rows, r_rows = rows_of(x), None if residual is None else rows_of(residual)
    (M, N), dtype = x_rows.shape, x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    h = x.new_empty(x.shape if residual is not None else 0, dtype=dtype)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    tile = row_tile(N)
    launch(
        layer_norm_forward,
        (triton.cdiv(M, tile.rows),),
        x,
        *(x_rows, r_rows, _flat(weight), _flat(bias), y, h, mean, rstd),
        *(M, N, x_rows.stride(0), 0 if r_rows is None else r_rows.stride(0), eps),
        ADD=residual is not None,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        ROWS=tile.rows,
        COLS=tile.columns,
        WHOLE=tile.whole,
        warps=tile.warps,
    )
    return y, h, mean, rstd


def backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, want_parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, weight and bias."""
    dy_rows, h_rows, dh_rows = rows_of(dy), rows_of(h), None if dh is None else rows_of(dh)
    M, N = h_rows.shape
    dx = h.new_empty(h.shape)
    tile = row_tile(N)
    programs = num_programs(h, triton.cdiv(M, tile.rows))
    dw, db = (mean.new_zeros((programs, N) if want_parameters else (1, 0)) for _ in range(2))
    launch(
        layer_norm_backward,
        (programs,),
        h,
        *(dy_rows, dh_rows, h_rows, _flat(weight), mean, rstd, dx, dw, db),
        *(M, N, dy_rows.stride(0), 0 if dh_rows is None else dh_rows.stride(0), h_rows.stride(0)),
        WEIGHT=weight is not None,
        DH=dh is not None,
        PARAMETERS=want_parameters,
        ROWS=tile.rows,
        COLS=tile.columns,
        WHOLE=tile.whole,
        warps=tile.warps,
    )
    return dx, dw.sum(0), db.sum(0)


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()
