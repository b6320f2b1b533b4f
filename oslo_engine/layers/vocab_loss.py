"""Cross-entropy over a vocabulary that is cut over tp: whole logits never exist on any rank.

Source: Megatron-LM (arXiv 1909.08053), section 3; label smoothing and the reductions are as torch defines them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from oslo_engine.comm.collectives import all_reduce_sum, reduce_from
from oslo_engine.layers.vocab_layout import VocabLayout, check_ids
from oslo_engine.layers.vocab_reductions import as_rows, loss_dtype, math_dtype, pick, pieces, row_exp_sum, row_max
from oslo_engine.layers.vocab_tensor import NeedsWholeVocabulary, VocabShard


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` with class indices as targets.

    Args:
        input: shard of [N, V], [V] or [N, V, ...].
        target: replicated ids, [N], [] or [N, ...].

    Returns:
        The loss of the whole vocabulary, the same on every rank.

    Raises:
        IndexError: a target outside the vocabulary that is not ``ignore_index``.

    Communication: forward three all-reduces of [N] (maximum, sum of exponentials, target logit), with label smoothing a fourth
    (sum of logits); backward none.
    """
    shard, target, used = _checked(input, target, weight, size_average, reduce, ignore_index)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0, got {label_smoothing}")
    local = shard.raw_local().movedim(shard.vocab.dim, -1)
    losses = _CrossEntropy.apply(local, target, used, shard.vocab, label_smoothing)
    return _reduced(losses, used, reduction, loss_dtype(shard))


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """``torch.nn.functional.nll_loss`` of log-probabilities. Communication: forward one all-reduce of [N], backward none."""
    shard, target, used = _checked(input, target, weight, size_average, reduce, ignore_index)
    vocab = shard.vocab
    local = shard.to_local().movedim(vocab.dim, -1)
    picked = reduce_from(pick(local, target.unsqueeze(-1), vocab), vocab.axis).squeeze(-1)
    losses = torch.where(used, -picked.to(math_dtype(picked.dtype)), 0)
    return _reduced(losses, used, reduction, loss_dtype(shard))


def _checked(
    input: Tensor, target: Tensor, weight: Any, size_average: Any, reduce: Any, ignore_index: int
) -> tuple[VocabShard, Tensor, Tensor]:
    """Refuse what is not supported; return the shard, targets with 0 at the ignored positions, and the mask of the others."""
    if not isinstance(input, VocabShard) or isinstance(target, VocabShard):
        raise NeedsWholeVocabulary("logits as targets")
    if weight is not None or size_average is not None or reduce is not None:
        raise NeedsWholeVocabulary("`weight`, `size_average` and `reduce` are not supported")
    if target.is_floating_point():
        raise NeedsWholeVocabulary("class probabilities as targets are not supported")
    class_dim = 1 if input.ndim > 1 else 0
    if input.ndim + input.vocab.dim != class_dim:
        raise NeedsWholeVocabulary(f"dim {class_dim} of {tuple(input.shape)} must be the vocabulary")
    expected = input.shape[:class_dim] + input.shape[class_dim + 1 :]
    if target.shape != expected:
        raise ValueError(
            f"expected targets of shape {tuple(expected)} for logits {tuple(input.shape)}, got {tuple(target.shape)}"
        )
    used = target != ignore_index
    check_ids(target, input.vocab.total, what="target", used=used)
    return input, torch.where(used, target, 0).long(), used


def _reduced(losses: Tensor, used: Tensor, reduction: str, dtype: torch.dtype) -> Tensor:
    if reduction == "none":
        return losses.to(dtype)
    if reduction == "sum":
        return losses.sum().to(dtype)
    if reduction == "mean":
        return (losses.sum() / used.sum()).to(dtype)  # nan where every target is ignored, as in torch
    raise ValueError(f"{reduction} is not a valid value for reduction")


class _CrossEntropy(Function):
    """Loss of each target, zero where unused.

    Saved are the logits, which live anyway, and a few numbers a row. Backward computes the softmax anew, piece by piece,
    straight into the gradient: beyond logits and gradient the memory is one piece.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, target: Tensor, used: Tensor, vocab: VocabLayout, smoothing: float) -> Tensor:
        """[.., slice], [..], [..] -> [..], in fp32 or fp64."""
        rows, ids = as_rows(local), target.reshape(-1, 1)
        top = row_max(rows, vocab)
        summed = row_exp_sum(rows, top, vocab)
        _, inside = vocab.locate(ids)
        own = torch.where(inside, pick(rows, ids, vocab) - top, 0)
        losses = summed.log() - all_reduce_sum(own, vocab.axis)
        if smoothing:
            uniform = summed.log() - _row_sum(rows, top, vocab) / vocab.total
            losses = (1 - smoothing) * losses + smoothing * uniform
        ctx.save_for_backward(local, target, used, top, summed)
        ctx.vocab, ctx.smoothing = vocab, smoothing
        return losses.view(target.shape).masked_fill(~used, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """softmax - (1 - smoothing) * onehot(target) - smoothing / V, times the loss's gradient."""
        local, target, used, top, summed = ctx.saved_tensors
        rows, vocab = as_rows(local), ctx.vocab
        scale = torch.where(used, grad, 0).reshape(-1, 1).to(top.dtype)
        at, inside = vocab.locate(target.reshape(-1, 1))
        hit = torch.where(inside, scale * (ctx.smoothing - 1), 0)
        result = torch.empty_like(rows)
        for piece in pieces(rows):
            part = (rows[piece] - top[piece]).exp_().mul_(scale[piece] / summed[piece])
            if ctx.smoothing:
                part.sub_(scale[piece] * (ctx.smoothing / vocab.total))
            if vocab.length:
                part.scatter_add_(-1, at[piece], hit[piece])
            result[piece] = part
        return result.view(local.shape), None, None, None, None


def _row_sum(rows: Tensor, top: Tensor, vocab: VocabLayout) -> Tensor:
    """Sum of logit - top over the whole vocabulary, [N, 1]. Communication: one all-reduce of [N]."""
    summed = torch.empty_like(top)
    for piece in pieces(rows):
        summed[piece] = (rows[piece] - top[piece]).sum(-1, keepdim=True)
    return all_reduce_sum(summed, vocab.axis)
