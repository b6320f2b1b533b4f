"""Cross-entropy with class indices, over a whole vocabulary or over one rank's slice of it.

    loss = lse - (1 - s) * logit[target] - s * mean(logits)         lse = log(sum(exp(logits))), s = label smoothing

A slice gives the three numbers a row that the loss is made of (``cross_entropy_parts``); the ranks' numbers are then joined:

    top = max over ranks of lse_r;   lse = top + log(sum over ranks of exp(lse_r - top));   own and summed are added up

and going back each rank's lse_r has the gradient dlse * exp(lse_r - lse). The parts are differentiable, so autograd gets there
by itself wherever the joining is differentiable. Probabilities are never stored: backward computes them from logits and lse.

Source: Megatron-LM (arXiv 1909.08053), section 3; online softmax: Milakov, Gimelshein (arXiv 1805.02867).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.kernels.dispatch import require, runs_triton, widen


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Loss over a whole vocabulary.

    Args:
        logits: [.., V]; fp32, bf16, fp16 (or fp64, by the reference); any strides.
        target: [..], integers.
        reduction: "mean" (over targets that are not ignored), "sum" or "none".

    Returns:
        fp32 (fp64 for fp64 logits): a scalar, or [..], 0 where ignored.

    Raises:
        IndexError: a target outside the vocabulary, on the CPU. On a GPU, which is not waited for, its loss is nan.

    Saved for backward: logits, target and one number a row.
    """
    require(reduction in ("mean", "sum", "none"), "no such reduction", where="cross_entropy", got=reduction)
    losses = torch.ops.oslo_engine.cross_entropy(logits, target, ignore_index, label_smoothing)[0]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


def cross_entropy_parts(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a slice of the vocabulary contributes to the loss of each row.

    Args:
        logits: [.., slice]; as for ``cross_entropy``; may be empty.
        target: [..], integers, ids of the whole vocabulary.
        start: id of the slice's first logit.

    Returns:
        lse: [..], log(sum(exp(logits))); -inf for an empty slice.
        own: [..], the target's logit, 0 where the target is not in the slice.
        summed: [..], sum of the logits.
        All in fp32 (fp64 for fp64 logits).

    Saved for backward: logits, target, lse.
    """
    return torch.ops.oslo_engine.cross_entropy_parts(logits, target, start)


def reference(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """lse, own, summed of [.., slice]."""
    wide = widen(logits)
    position, inside = _locate(target, start, logits.shape[-1])
    if logits.shape[-1] == 0:
        return wide.new_full(target.shape, -torch.inf), wide.new_zeros(target.shape), wide.new_zeros(target.shape)
    own = wide.gather(-1, position.unsqueeze(-1)).squeeze(-1)
    return wide.logsumexp(-1), torch.where(inside, own, 0), wide.sum(-1)


def reference_backward(
    dlse: Tensor, down: Tensor, dsummed: Tensor | None, logits: Tensor, target: Tensor, lse: Tensor, start: int
) -> Tensor:
    """dlse * exp(logits - lse) + down at the target + dsummed everywhere."""
    if logits.shape[-1] == 0:
        return logits.new_empty(logits.shape)
    scale, bottom = dlse.unsqueeze(-1), lse.unsqueeze(-1)
    nothing = (scale == 0) | (bottom == -torch.inf)  # 0 * nan would spoil rows that do not count
    grad = torch.where(nothing, 0, scale * torch.exp(widen(logits) - bottom))
    if dsummed is not None:
        grad = grad + dsummed.unsqueeze(-1)
    position, inside = _locate(target, start, logits.shape[-1])
    grad = grad.scatter_add(-1, position.unsqueeze(-1), torch.where(inside, down, 0).unsqueeze(-1))
    return grad.to(logits.dtype).contiguous()


def _locate(target: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Position in the slice (0 where outside), and whether it is inside."""
    inside = (target >= start) & (target < start + length)
    return torch.where(inside, target - start, 0).long(), inside


def _check(name: str, logits: Tensor, target: Tensor) -> None:
    fits = logits.dim() > 0 and logits.is_floating_point()
    require(fits, "logits must be [.., V] of floats", where=name, got=f"{logits.dtype} {tuple(logits.shape)}")
    whole = target.dtype in (torch.int64, torch.int32)
    require(whole, "targets must be class indices", where=name, expected="int64 or int32", got=target.dtype)
    same = target.shape == logits.shape[:-1]
    require(same, "target does not fit logits", where=name, expected=tuple(logits.shape[:-1]), got=tuple(target.shape))


def _parts(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    if runs_triton(logits):
        from oslo_engine.kernels.gpu import cross_entropy as gpu

        return gpu.forward(logits, target, start)
    return reference(logits, target, start)


@torch.library.custom_op("oslo_engine::cross_entropy_parts", mutates_args=())
def _cross_entropy_parts(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    _check("cross_entropy_parts", logits, target)
    return _parts(logits, target, start)


@_cross_entropy_parts.register_fake
def _(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    _check("cross_entropy_parts", logits, target)
    return _number(logits), _number(logits), _number(logits)


def _number(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.promote_types(logits.dtype, torch.float32))


@torch.library.custom_op("oslo_engine::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Losses and lse."""
    _check("cross_entropy", logits, target)
    _check_smoothing(label_smoothing)
    used, length = target != ignore_index, logits.shape[-1]
    known = (target >= 0) & (target < length)
    if target.device.type == "cpu" and bool((used & ~known).any()):
        raise IndexError(f"target {target[used & ~known][0].item()} is out of bounds for {length} classes")
    lse, own, summed = _parts(logits, target, 0)
    losses = lse - own
    if label_smoothing:
        losses = torch.lerp(losses, lse - summed / length, label_smoothing)
    return torch.where(used, torch.where(known, losses, torch.nan), 0), lse


@_cross_entropy.register_fake
def _(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    _check("cross_entropy", logits, target)
    _check_smoothing(label_smoothing)
    return _number(logits), _number(logits)


def _check_smoothing(label_smoothing: float) -> None:
    require(
        0 <= label_smoothing <= 1, "label_smoothing is a share", where="cross_entropy", expected="0 to 1", got=label_smoothing
    )


@torch.library.custom_op("oslo_engine::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    dlse: Tensor, down: Tensor, dsummed: Tensor | None, logits: Tensor, target: Tensor, lse: Tensor, start: int
) -> Tensor:
    """Gradient of the logits from those of the three parts, [..] each; in the logits' dtype."""
    if runs_triton(logits):
        from oslo_engine.kernels.gpu import cross_entropy as gpu

        return gpu.backward(dlse, down, dsummed, logits, target, lse, start)
    return reference_backward(dlse, down, dsummed, logits, target, lse, start)


@_cross_entropy_backward.register_fake
def _(dlse: Tensor, down: Tensor, dsummed: Tensor | None, logits: Tensor, target: Tensor, lse: Tensor, start: int) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_parts(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ctx.start = inputs
    ctx.save_for_backward(logits, target, output[0])


def _backward_parts(ctx: Any, dlse: Tensor, down: Tensor, dsummed: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.oslo_engine.cross_entropy_backward(dlse, down, dsummed, *ctx.saved_tensors, ctx.start), None, None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, ctx.ignore_index, ctx.label_smoothing = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dlosses: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    logits, target, lse = ctx.saved_tensors
    smoothing = ctx.label_smoothing
    dlse = torch.where(target != ctx.ignore_index, dlosses, 0)
    dsummed = dlse * (-smoothing / logits.shape[-1]) if smoothing else None
    backward = torch.ops.oslo_engine.cross_entropy_backward
    return backward(dlse, dlse * (smoothing - 1), dsummed, logits, target, lse, 0), None, None, None


_cross_entropy_parts.register_autograd(_backward_parts, setup_context=_setup_parts)
_cross_entropy.register_autograd(_backward, setup_context=_setup)
