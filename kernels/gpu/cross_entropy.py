"""Triton programs of cross_entropy; the formulas are in ``oslo_engine.kernels.cross_entropy``.

Forward reads the logits once, keeping maximum and sum as it goes (online softmax); backward reads them once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oslo_engine.kernels.dispatch import rows_of
from oslo_engine.kernels.gpu.launch import launch, plain_tile, row_tile


@triton.jit
def cross_entropy_forward(
    x_ptr, target_ptr, lse_ptr, own_ptr, sum_ptr, M, N, start, sx, ROWS: tl.constexpr, COLS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, N, COLS):
        at = first + cols
        mask = (rows[:, None] < M) & (at[None, :] < N)
        x = tl.load(x_ptr + rows[:, None] * sx + at[None, :], mask=mask, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be nan
        total = total * tl.exp(top - level) + tl.sum(tl.exp(x - level[:, None]), axis=1)
        top = higher
        sums += tl.where(mask, x, 0.0)
    target = tl.load(target_ptr + rows, mask=rows < M, other=0).to(tl.int64) - start
    inside = (rows < M) & (target >= 0) & (target < N)
    own = tl.load(x_ptr + rows * sx + target, mask=inside, other=0.0).to(tl.float32)
    lse = tl.where(total == 0.0, float("-inf"), top + tl.log(total))
    tl.store(lse_ptr + rows, lse, mask=rows < M)
    tl.store(own_ptr + rows, own, mask=rows < M)
    tl.store(sum_ptr + rows, tl.sum(sums, axis=1), mask=rows < M)


@triton.jit
def cross_entropy_backward(
    dlse_ptr,
    down_ptr,
    dsum_ptr,
    x_ptr,
    target_ptr,
    lse_ptr,
    dx_ptr,
    M,
    N,
    start,
    sx,
    SUMMED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    dlse = tl.load(dlse_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows[:, None] * sx + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    nothing = (dlse == 0.0) | (lse == float("-inf"))  # 0 * nan would spoil rows that do not count
    dx = tl.where(nothing[:, None], 0.0, dlse[:, None] * tl.exp(x - lse[:, None]))
    if SUMMED:
        dx += tl.load(dsum_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    target = tl.load(target_ptr + rows, mask=rows < M, other=0).to(tl.int64) - start
    down = tl.load(down_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)
    dx += tl.where(cols[None, :] == target[:, None], down[:, None], 0.0)
    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


def forward(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """lse, own, summed."""
    rows = rows_of(logits)
    M, N = rows.shape
    lse, own, summed = (logits.new_empty(target.shape, dtype=torch.float32) for _ in range(3))
    tile = row_tile(N, longest=4096)
    launch(
        cross_entropy_forward,
        (triton.cdiv(M, tile.rows),),
        logits,
        *(rows, target.contiguous(), lse, own, summed, M, N, start, rows.stride(0)),
        ROWS=tile.rows,
        COLS=tile.columns,
        warps=tile.warps,
    )
    return lse, own, summed


def backward(
    dlse: Tensor, down: Tensor, dsummed: Tensor | None, logits: Tensor, target: Tensor, lse: Tensor, start: int
) -> Tensor:
    """Gradient of the logits."""
    rows = rows_of(logits)
    M, N = rows.shape
    dx = logits.new_empty(logits.shape)
    tile = plain_tile(N)
    launch(
        cross_entropy_backward,
        (triton.cdiv(M, tile.rows), triton.cdiv(N, tile.columns)),
        logits,
        *(dlse.contiguous(), down.contiguous(), None if dsummed is None else dsummed.contiguous()),
        *(rows, target.contiguous(), lse.contiguous(), dx, M, N, start, rows.stride(0)),
        SUMMED=dsummed is not None,
        ROWS=tile.rows,
        COLS=tile.columns,
        warps=tile.warps,
    )
    return dx
