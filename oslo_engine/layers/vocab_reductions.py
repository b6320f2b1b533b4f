"""Reductions over the vocabulary of sharded logits: each rank reduces its slice, one small all-reduce joins the results.

N below is batch * sequence. Half precision is reduced in fp32 and rounded once at the end, as in torch's own kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from oslo_engine.comm.collectives import all_reduce_max, all_reduce_sum, reduce_from
from oslo_engine.layers.vocab_layout import VocabLayout, check_ids
from oslo_engine.layers.vocab_tensor import NeedsWholeVocabulary, VocabShard

# Rows are worked on in pieces of about this many elements, so that an fp32 temporary is 64 MiB however large the vocabulary is.
PIECE_ELEMENTS = 1 << 24


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def loss_dtype(shard: VocabShard) -> torch.dtype:
    """The dtype torch gives losses and softmaxes of these logits: autocast computes them in fp32."""
    return math_dtype(shard.dtype) if torch.is_autocast_enabled(shard.device.type) else shard.dtype


def as_rows(local: Tensor) -> Tensor:
    """[.., slice] -> [N, slice]; a slice may be empty."""
    return local.reshape(math.prod(local.shape[:-1]), local.shape[-1])


def pieces(rows: Tensor) -> Sequence[slice]:
    step = max(1, PIECE_ELEMENTS // max(1, rows.shape[-1]))
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]


def row_max(rows: Tensor, vocab: VocabLayout) -> Tensor:
    """[N, slice] -> [N, 1], over the whole vocabulary. Communication: one all-reduce of [N]."""
    empty = rows.shape[-1] == 0
    top = rows.new_full((rows.shape[0], 1), -torch.inf) if empty else rows.detach().amax(-1, keepdim=True)
    return all_reduce_max(top.to(math_dtype(rows.dtype)), vocab.axis)


def row_exp_sum(rows: Tensor, top: Tensor, vocab: VocabLayout) -> Tensor:
    """Sum of exp(logit - top) over the whole vocabulary, [N, 1]. Communication: one all-reduce of [N]."""
    total = torch.empty_like(top)
    for piece in pieces(rows):
        total[piece] = (rows[piece] - top[piece]).exp_().sum(-1, keepdim=True)
    return all_reduce_sum(total, vocab.axis)


def pick(rows: Tensor, ids: Tensor, vocab: VocabLayout) -> Tensor:
    """The entries of this rank's slice that have these global ids, zero for ids of other ranks.

    Args:
        rows: [.., slice].
        ids: [.., k], valid ids.
    """
    if rows.shape[-1] == 0:  # zeros that stay in the graph: this rank too must take part in the backward
        return rows.sum(-1, keepdim=True).expand(ids.shape)
    at, inside = vocab.locate(ids)
    return rows.gather(-1, at).masked_fill(~inside, 0)


def gather(shard: VocabShard, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Look up vocabulary entries: a whole, replicated result. Communication: forward one all-reduce of ``index``'s size."""
    _require_vocabulary_dim(shard, dim)
    check_ids(index, shard.vocab.total, what="index")
    picked = pick(shard.to_local().movedim(dim, -1), index.movedim(dim, -1), shard.vocab)
    return reduce_from(picked, shard.vocab.axis).movedim(-1, dim)


def total(
    shard: VocabShard, dim: Any = None, keepdim: bool = False, *, axis: Any = None, dtype: torch.dtype | None = None
) -> Tensor:
    """``sum``. Communication: forward one all-reduce of the result's size if the vocabulary is summed over, else none."""
    return _sum(shard, dim if axis is None else axis, keepdim, dtype, mean=False)


def mean(
    shard: VocabShard, dim: Any = None, keepdim: bool = False, *, axis: Any = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Communication: as ``total``."""
    return _sum(shard, dim if axis is None else axis, keepdim, dtype, mean=True)


def _sum(shard: VocabShard, dim: Any, keepdim: bool, dtype: torch.dtype | None, mean: bool) -> Tensor:
    ndim, vocab = shard.ndim, shard.vocab
    dims = sorted({one % ndim for one in ((dim,) if isinstance(dim, int) else dim or range(ndim))})
    local = shard.to_local()
    wide = math_dtype(local.dtype) if local.is_floating_point() else None
    part = local.sum(dims, keepdim=keepdim, dtype=wide)
    count = torch.Size(shard.shape[one] for one in dims).numel() if mean else 1
    if ndim + vocab.dim in dims:
        part = reduce_from(part, vocab.axis)
    if mean:
        part = part / count
    part = part.to(dtype or (local.dtype if wide else part.dtype))
    if ndim + vocab.dim in dims:
        return part
    behind = sum(one > ndim + vocab.dim for one in dims)
    return VocabShard.wrap(part, vocab if keepdim else vocab.at_dim(vocab.dim + behind))


def argmax(shard: VocabShard, dim: int | None = None, keepdim: bool = False, *, axis: int | None = None) -> Tensor:
    """Global id of the largest entry; the first one of equals. Communication: two all-reduces of the result's size."""
    return _top(shard, dim if axis is None else axis, keepdim)


def maximum(shard: VocabShard, dim: Any = None, keepdim: bool = False, *, axis: int | None = None) -> Any:
    """``max(dim)``: values and global ids. Communication: three all-reduces of the result's size, none backward."""
    index = _top(shard, dim if axis is None else axis, True)
    dim = dim if axis is None else axis
    values = gather(shard, dim, index)
    return torch.return_types.max((values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim)))


def _top(shard: VocabShard, dim: Any, keepdim: bool) -> Tensor:
    _require_vocabulary_dim(shard, dim)
    vocab, local = shard.vocab, shard.to_local().detach()
    if vocab.length:
        best, at = local.max(dim, keepdim=True)
    else:
        shape = [1 if one == dim % shard.ndim else length for one, length in enumerate(local.shape)]
        best, at = local.new_full(shape, -torch.inf), torch.zeros(shape, dtype=torch.long, device=local.device)
    top = all_reduce_max(best, vocab.axis)
    # The smallest id among the ranks that hold the maximum, by a maximum of negated ids.
    index = -all_reduce_max(-torch.where(best == top, at + vocab.start, vocab.total - 1), vocab.axis)
    return index if keepdim else index.squeeze(dim)


def logsumexp(shard: VocabShard, dim: Any, keepdim: bool = False) -> Tensor:
    """Communication: forward two all-reduces of [N], backward none."""
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    _require_vocabulary_dim(shard, dim)
    result = _LogSumExp.apply(shard.raw_local().movedim(dim, -1), shard.vocab).to(loss_dtype(shard))
    return result.unsqueeze(dim) if keepdim else result


def softmax(shard: VocabShard, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> VocabShard:
    """Communication: forward two all-reduces of [N], backward one."""
    return _softmax(shard, dim, dtype, log=False)


def log_softmax(
    shard: VocabShard, dim: int | None = None, dtype: torch.dtype | None = None, _stacklevel: int = 3
) -> VocabShard:
    """Communication: forward two all-reduces of [N], backward one."""
    return _softmax(shard, dim, dtype, log=True)


def _softmax(shard: VocabShard, dim: int | None, dtype: torch.dtype | None, log: bool) -> VocabShard:
    _require_vocabulary_dim(shard, dim)
    local = shard.raw_local().movedim(shard.vocab.dim, -1)
    result = _Softmax.apply(local, shard.vocab, dtype or loss_dtype(shard), log)
    return VocabShard.wrap(result.movedim(-1, shard.vocab.dim), shard.vocab)


def _require_vocabulary_dim(shard: VocabShard, dim: Any) -> None:
    if not isinstance(shard, VocabShard):
        raise NeedsWholeVocabulary("the logits are not the first argument")
    if not isinstance(dim, int) or dim % shard.ndim != shard.ndim + shard.vocab.dim:
        raise NeedsWholeVocabulary(f"only over the vocabulary dimension ({shard.vocab.dim}), not dim={dim}")


class _Softmax(Function):
    """[.., slice] -> [.., slice]; keeps its result only."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, vocab: VocabLayout, dtype: torch.dtype, log: bool) -> Tensor:
        rows = as_rows(local)
        top = row_max(rows, vocab)
        summed = row_exp_sum(rows, top, vocab)
        result = rows - top
        result = result.sub_(summed.log()) if log else result.exp_().div_(summed)
        result = result.to(dtype).view(local.shape)
        ctx.save_for_backward(result)
        ctx.vocab, ctx.log, ctx.dtype = vocab, log, local.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (result,) = ctx.saved_tensors
        wide = math_dtype(result.dtype)
        grad, result = grad.to(wide), result.to(wide)
        part = (grad if ctx.log else grad * result).sum(-1, keepdim=True)
        summed = all_reduce_sum(part, ctx.vocab.axis)
        local = grad - result.exp() * summed if ctx.log else (grad - summed) * result
        return local.to(ctx.dtype), None, None, None


class _LogSumExp(Function):
    """[.., slice] -> [..], in fp32 or fp64."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, vocab: VocabLayout) -> Tensor:
        rows = as_rows(local)
        top = row_max(rows, vocab)
        summed = row_exp_sum(rows, top, vocab)
        ctx.save_for_backward(local, top, summed)
        return (top + summed.log()).view(local.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        local, top, summed = ctx.saved_tensors
        rows = as_rows(local)
        result, scale = torch.empty_like(rows), grad.reshape(-1, 1) / summed
        for piece in pieces(rows):
            result[piece] = (rows[piece] - top[piece]).exp_().mul_(scale[piece])
        return result.view(local.shape), None
