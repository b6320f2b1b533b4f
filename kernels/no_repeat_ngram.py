"""Blocking of repeated n-grams in generation: no token may complete an n-gram that the sequence holds already.

    scores[b, ids[b, i + n - 1]] = -inf     for every i with ids[b, i : i + n - 1] == ids[b, L - n + 1 : L]

Source: fairseq (arXiv 1904.01038); equal to ``NoRepeatNGramLogitsProcessor`` of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.kernels.dispatch import require, runs_triton


def no_repeat_ngram(scores: Tensor, ids: Tensor, ngram_size: int) -> Tensor:
    """Ban the tokens that would repeat an n-gram.

    Args:
        scores: [B, V], of the next token; fp32, bf16, fp16 (or fp64, by the reference); any strides; unchanged.
        ids: [B, L], integers, the sequences so far. Ids outside 0 .. V - 1 count as context; they cannot be banned.
        ngram_size: at least 1.

    Returns:
        [B, V], contiguous: the scores, -inf where banned. Their gradient is 0 where banned.

    Saved for backward: ids.
    """
    return torch.ops.oslo_engine.no_repeat_ngram(scores, ids, ngram_size, -torch.inf)


def reference(scores: Tensor, ids: Tensor, ngram_size: int, fill: float) -> Tensor:
    """The scores with ``fill`` where a token is banned."""
    (_, length), size = ids.shape, scores.shape[-1]
    if length < ngram_size:
        return scores.clone(memory_format=torch.contiguous_format)
    windows = ids.unfold(1, ngram_size, 1)
    repeats = (windows[..., :-1] == ids[:, length - ngram_size + 1 :].unsqueeze(1)).all(-1)
    token = windows[..., -1]
    column = torch.where(
        repeats & (token >= 0) & (token < size), token, size
    ).long()  # one more column takes what is not banned
    banned = scores.new_zeros((scores.shape[0], size + 1), dtype=torch.bool).scatter_(1, column, True)
    return scores.masked_fill(banned[:, :size], fill).contiguous()


def _check(scores: Tensor, ids: Tensor, ngram_size: int) -> None:
    name = "no_repeat_ngram"
    fits = scores.dim() == 2 and scores.is_floating_point()
    require(fits, "scores must be [B, V] of floats", where=name, got=f"{scores.dtype} {tuple(scores.shape)}")
    fits = ids.dim() == 2 and ids.shape[0] == scores.shape[0] and ids.dtype in (torch.int64, torch.int32)
    wanted, found = f"int64 or int32 [{scores.shape[0]}, L]", f"{ids.dtype} {tuple(ids.shape)}"
    require(fits, "ids do not fit scores", where=name, expected=wanted, got=found)
    require(ngram_size >= 1, "an n-gram has at least one token", where=name, got=ngram_size)


@torch.library.custom_op("oslo_engine::no_repeat_ngram", mutates_args=())
def _no_repeat_ngram(scores: Tensor, ids: Tensor, ngram_size: int, fill: float) -> Tensor:
    _check(scores, ids, ngram_size)
    if runs_triton(scores):
        from oslo_engine.kernels.gpu import no_repeat_ngram as gpu

        return gpu.forward(scores, ids, ngram_size, fill)
    return reference(scores, ids, ngram_size, fill)


@_no_repeat_ngram.register_fake
def _(scores: Tensor, ids: Tensor, ngram_size: int, fill: float) -> Tensor:
    _check(scores, ids, ngram_size)
    return scores.new_empty(scores.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids, ctx.ngram_size, _ = inputs
    ctx.save_for_backward(ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return torch.ops.oslo_engine.no_repeat_ngram(grad, ids, ctx.ngram_size, 0.0), None, None, None


_no_repeat_ngram.register_autograd(_backward, setup_context=_setup)
