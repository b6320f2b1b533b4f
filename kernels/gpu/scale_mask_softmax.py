"""Triton programs of scale_mask_softmax; the formulas are in ``oslo_engine.kernels.scale_mask_softmax``.

Forward reads a row of scores once; rows longer than a tile twice, keeping maximum and sum as it goes (online softmax), and not
beyond the diagonal of a causal mask. Mask and bias are read where they lie, by their strides. No length is too long.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from oslo_engine.kernels.dispatch import rows_of
from oslo_engine.kernels.gpu.launch import launch, row_tile, warps_for


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _masked_scores(
    x_ptr,
    bias_row,
    mask_row,
    slope,
    rows,
    distance,
    cols,
    M,
    K,
    sx,
    sbk,
    smk,
    scale,
    softcap,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    ALIBI: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Tile of s; ``distance`` is from each row's query to key 0."""
    inside = (rows[:, None] < M) & (cols[None, :] < K)
    s = tl.load(x_ptr + rows[:, None] * sx + cols[None, :], mask=inside, other=float("-inf")).to(tl.float32) * scale
    if SOFTCAP:
        s = softcap * _tanh(s / softcap)
    at = cols[None, :].to(tl.int64)
    if BIAS:
        s += tl.load(bias_row[:, None] + at * sbk, mask=inside, other=0.0).to(tl.float32)
    if ALIBI:
        s += slope[:, None] * (distance[:, None] + cols[None, :]).to(tl.float32)
    keep = inside
    if MASK:
        keep = keep & (tl.load(mask_row[:, None] + at * smk, mask=inside, other=0) != 0)
    if CAUSAL:
        keep = keep & (distance[:, None] + cols[None, :] <= 0)
    return tl.where(keep, s, float("-inf"))


@triton.jit
def scale_mask_softmax_forward(
    x_ptr,
    mask_ptr,
    bias_ptr,
    slope_ptr,
    sink_ptr,
    y_ptr,
    share_ptr,
    M,
    H,
    Q,
    K,
    sx,
    smb,
    smh,
    smq,
    smk,
    sbb,
    sbh,
    sbq,
    sbk,
    scale,
    softcap,
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, h, q = rows // Q // H, rows // Q % H, rows % Q
    distance = (Q - K - q).to(tl.int32)
    mask_row = mask_ptr
    bias_row = bias_ptr
    slope = tl.zeros([ROWS], tl.float32)
    if MASK:
        mask_row = mask_ptr + b * smb + h * smh + q * smq
    if BIAS:
        bias_row = bias_ptr + b * sbb + h * sbh + q * sbq
    if ALIBI:
        slope = tl.load(slope_ptr + h, mask=rows < M, other=0.0).to(tl.float32)
    sink = tl.full([ROWS], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sink_ptr + h, mask=rows < M, other=float("-inf")).to(tl.float32)
    cols = tl.arange(0, COLS)
    if WHOLE:
        s = _masked_scores(
            x_ptr,
            bias_row,
            mask_row,
            slope,
            rows,
            distance,
            cols,
            M,
            K,
            sx,
            sbk,
            smk,
            scale,
            softcap,
            MASK,
            BIAS,
            ALIBI,
            CAUSAL,
            SOFTCAP,
        )
        top = tl.maximum(tl.max(s, axis=1), sink)
        level = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be nan
        weights = tl.exp(s - level[:, None])
        total = tl.sum(weights, axis=1) + tl.exp(sink - level)
        y = weights / tl.where(total == 0.0, 1.0, total)[:, None]
        inside = (rows[:, None] < M) & (cols[None, :] < K)
        tl.store(y_ptr + rows[:, None] * K + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        end = K
        if CAUSAL:
            end = tl.minimum(K, 1 - tl.min(distance, axis=0))
        top = sink
        total = tl.where(sink == float("-inf"), 0.0, 1.0)
        for first in range(0, end, COLS):
            s = _masked_scores(
                x_ptr,
                bias_row,
                mask_row,
                slope,
                rows,
                distance,
                first + cols,
                M,
                K,
                sx,
                sbk,
                smk,
                scale,
                softcap,
                MASK,
                BIAS,
                ALIBI,
                CAUSAL,
                SOFTCAP,
            )
            higher = tl.maximum(top, tl.max(s, axis=1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(top - level) + tl.sum(tl.exp(s - level[:, None]), axis=1)
            top = higher
        level = tl.where(top == float("-inf"), 0.0, top)
        whole = tl.where(total == 0.0, 1.0, total)
        for first in range(0, K, COLS):
            s = _masked_scores(
                x_ptr,
                bias_row,
                mask_row,
                slope,
                rows,
                distance,
                first + cols,
                M,
                K,
                sx,
                sbk,
                smk,
                scale,
                softcap,
                MASK,
                BIAS,
                ALIBI,
                CAUSAL,
                SOFTCAP,
            )
            y = tl.exp(s - level[:, None]) / whole[:, None]
            inside = (rows[:, None] < M) & (first + cols[None, :] < K)
            tl.store(y_ptr + rows[:, None] * K + first + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    if SINKS:
        tl.store(share_ptr + rows, tl.exp(sink - level) / tl.where(total == 0.0, 1.0, total), mask=rows < M)


@triton.jit
def _read_gradient(dy_ptr, y_ptr, rows, cols, M, K, sdy):
    inside = (rows[:, None] < M) & (cols[None, :] < K)
    y = tl.load(y_ptr + rows[:, None] * K + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * sdy + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    return dy, y


@triton.jit
def _write_gradient(dx_ptr, x_ptr, ds, rows, cols, M, K, sx, scale, softcap, SOFTCAP: tl.constexpr):
    inside = (rows[:, None] < M) & (cols[None, :] < K)
    dx = ds * scale
    if SOFTCAP:
        x = tl.load(x_ptr + rows[:, None] * sx + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        bent = _tanh(x * scale / softcap)
        dx = tl.where(ds == 0.0, 0.0, dx * (1.0 - bent * bent))
    tl.store(dx_ptr + rows[:, None] * K + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scale_mask_softmax_backward(
    dy_ptr,
    y_ptr,
    x_ptr,
    dx_ptr,
    drift_ptr,
    M,
    K,
    sdy,
    sx,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    DRIFT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    if WHOLE:
        dy, y = _read_gradient(dy_ptr, y_ptr, rows, cols, M, K, sdy)
        drift = tl.sum(y * dy, axis=1)
        _write_gradient(dx_ptr, x_ptr, y * (dy - drift[:, None]), rows, cols, M, K, sx, scale, softcap, SOFTCAP)
    else:
        sums = tl.zeros([ROWS, COLS], tl.float32)
        for first in range(0, K, COLS):
            dy, y = _read_gradient(dy_ptr, y_ptr, rows, first + cols, M, K, sdy)
            sums += y * dy
        drift = tl.sum(sums, axis=1)
        for first in range(0, K, COLS):
            dy, y = _read_gradient(dy_ptr, y_ptr, rows, first + cols, M, K, sdy)
            _write_gradient(dx_ptr, x_ptr, y * (dy - drift[:, None]), rows, first + cols, M, K, sx, scale, softcap, SOFTCAP)
    if DRIFT:
        tl.store(drift_ptr + rows, drift, mask=rows < M)


@triton.jit
def scale_mask_softmax_backward_bias(
    dy_ptr,
    y_ptr,
    drift_ptr,
    db_ptr,
    H,
    Q,
    K,
    sdy,
    bias_H,
    bias_Q,
    sum_B,
    sum_H,
    sum_Q,
    COLS: tl.constexpr,
):
    """One row of the bias, summed over the rows of scores that it was added to."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < K
    b, h, q = row // bias_Q // bias_H, row // bias_Q % bias_H, row % bias_Q
    db = tl.zeros([COLS], tl.float32)
    for nth in range(0, sum_B * sum_H * sum_Q):
        # In each dimension either the bias has one row or the sum one term.
        other_b, other_h, other_q = nth // sum_Q // sum_H, nth // sum_Q % sum_H, nth % sum_Q
        at = ((b + other_b) * H + h + other_h) * Q + q + other_q
        y = tl.load(y_ptr + at * K + cols, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at * sdy + cols, mask=inside, other=0.0).to(tl.float32)
        db += y * (dy - tl.load(drift_ptr + at))
    tl.store(db_ptr + row * K + cols, db, mask=inside)


def forward(
    x: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Probabilities, and the share of the sinks (empty without)."""
    x_rows, (_, H, Q, K) = rows_of(x), x.shape
    y = x.new_empty(x.shape)
    share = x.new_empty(x.shape[:-1] if sinks is not None else 0, dtype=torch.float32)
    none = (0, 0, 0, 0)
    tile = row_tile(K)
    launch(
        scale_mask_softmax_forward,
        (triton.cdiv(x_rows.shape[0], tile.rows),) if K or sinks is not None else (0,),
        x,
        *(x_rows, None if mask is None else mask.view(torch.uint8), bias, _flat(slopes), _flat(sinks), y, share),
        *(x_rows.shape[0], H, Q, K, x_rows.stride(0)),
        *(none if mask is None else mask.expand(x.shape).stride()),
        *(none if bias is None else bias.expand(x.shape).stride()),
        *(scale, softcap),
        MASK=mask is not None,
        BIAS=bias is not None,
        ALIBI=slopes is not None,
        SINKS=sinks is not None,
        CAUSAL=causal,
        SOFTCAP=softcap > 0,
        ROWS=tile.rows,
        COLS=tile.columns,
        WHOLE=tile.whole,
        warps=tile.warps,
    )
    return y, share


def backward(
    dy: Tensor, y: Tensor, x: Tensor | None, scale: float, softcap: float, bias_shape: Sequence[int] | None, want_drift: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scores and bias (empty unless wanted), and sum of y * dy of each row (empty unless needed)."""
    dy_rows, x_rows, M, K = rows_of(dy), None if x is None else rows_of(x), y.shape[:-1].numel(), y.shape[-1]
    dx = y.new_empty(y.shape)
    want_drift = want_drift or bias_shape is not None
    drift = y.new_empty(y.shape[:-1] if want_drift else 0, dtype=torch.float32)
    tile = row_tile(K)
    launch(
        scale_mask_softmax_backward,
        (triton.cdiv(M, tile.rows),),
        y,
        *(dy_rows, y, x_rows, dx, drift, M, K, dy_rows.stride(0), 0 if x_rows is None else x_rows.stride(0), scale, softcap),
        SOFTCAP=x is not None,
        DRIFT=want_drift,
        ROWS=tile.rows,
        COLS=tile.columns,
        WHOLE=tile.whole,
        warps=tile.warps,
    )
    dbias = drift.new_empty(0) if bias_shape is None else _bias_gradient(dy_rows, y, drift, bias_shape)
    return dx, dbias, drift


def _bias_gradient(dy_rows: Tensor, y: Tensor, drift: Tensor, shape: Sequence[int]) -> Tensor:
    B, H, Q, K = y.shape
    dbias = drift.new_empty(*shape[:3], K)
    columns = min(1024, triton.next_power_of_2(max(K, 1)))
    terms = [size if kept == 1 else 1 for size, kept in zip((B, H, Q), shape, strict=False)]
    launch(
        scale_mask_softmax_backward_bias,
        (dbias.shape[:3].numel(), triton.cdiv(K, columns)),
        y,
        *(dy_rows, y, drift, dbias, H, Q, K, dy_rows.stride(0), shape[1], shape[2], *terms),
        warps=warps_for(columns),
        COLS=columns,
    )
    return dbias.sum(-1, keepdim=True) if shape[3] != K else dbias


def _flat(per_head: Tensor | None) -> Tensor | None:
    return None if per_head is None else per_head.contiguous()
