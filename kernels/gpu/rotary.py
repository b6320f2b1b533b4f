"""Triton program of rotary; the formulas are in ``oslo_engine.kernels.rotary``.

One program turns a few rows. Rows of x and of the tables are found by their own strides, so that neither the transposed views
that models make of queries and keys nor broadcast tables are copied.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from oslo_engine.kernels.gpu.launch import launch, row_tile


@triton.jit
def rotary_forward(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    M,
    B,
    C,
    D,
    HALF,
    sxa,
    sxb,
    sxc,
    sca,
    scb,
    scc,
    scd,
    ssa,
    ssb,
    ssc,
    ssd,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    REST: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a, b, c = rows // C // B, rows // C % B, rows % C
    cols = tl.arange(0, COLS)
    mask = (rows[:, None] < M) & (cols[None, :] < HALF)
    cos_at = (a * sca + b * scb + c * scc)[:, None] + cols[None, :] * scd
    sin_at = (a * ssa + b * ssb + c * ssc)[:, None] + cols[None, :] * ssd
    cos = tl.load(cos_ptr + cos_at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + sin_at, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    x_row = x_ptr + (a * sxa + b * sxb + c * sxc)[:, None]
    y_row = y_ptr + rows[:, None] * D
    if INTERLEAVED:  # both of a pair in one piece, for wide loads
        wide = tl.arange(0, 2 * COLS)
        mask = (rows[:, None] < M) & (wide[None, :] < 2 * HALF)
        pairs = tl.load(x_row + wide[None, :], mask=mask, other=0.0).to(tl.float32)
        u, v = tl.split(tl.reshape(pairs, [ROWS, COLS, 2]))
        turned = tl.reshape(tl.join(u * cos - v * sin, v * cos + u * sin), [ROWS, 2 * COLS])
        tl.store(y_row + wide[None, :], turned.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        u = tl.load(x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x_row + HALF + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(y_row + cols[None, :], (u * cos - v * sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_row + HALF + cols[None, :], (v * cos + u * sin).to(y_ptr.dtype.element_ty), mask=mask)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, REST)
        mask = (rows[:, None] < M) & (rest[None, :] < D)
        tl.store(y_row + rest[None, :], tl.load(x_row + rest[None, :], mask=mask, other=0.0), mask=mask)


def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """x, turned."""
    y = x.new_empty(x.shape)
    width, D = cos.shape[-1], x.shape[-1]
    leading = x.shape[:-1]
    x4 = _four_dims(x if D <= 1 or x.stride(-1) == 1 else x.contiguous())
    cos4, sin4 = (_four_dims(table.expand(*leading, width)) for table in (cos, sin))
    _, B, C, _ = x4.shape
    M, rest = leading.numel(), D - 2 * width
    tile = row_tile(width, longest=triton.next_power_of_2(max(width, 1)))
    launch(
        rotary_forward,
        (triton.cdiv(M, tile.rows),) if D else (0,),
        x,
        *(x4, cos4, sin4, y, M, B, C, D, width, *x4.stride()[:3], *cos4.stride(), *sin4.stride()),
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        ROWS=tile.rows,
        COLS=tile.columns,
        REST=triton.next_power_of_2(rest) if rest else 0,
        warps=tile.warps,
    )
    return y


def _four_dims(x: Tensor) -> Tensor:
    """[.., D] -> [a, b, c, D]: a view, unless there are more than three leading dimensions that do not join."""
    if x.dim() > 4:
        return x.flatten(0, x.dim() - 4)
    return x[(None,) * (4 - x.dim())]
