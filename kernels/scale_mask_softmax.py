"""Attention probabilities from scores, with everything that models do to the scores in between.

    s = scale * x                                   x = scores, [B, H, Q, K]
    s = softcap * tanh(s / softcap)                 where softcap > 0
    s = s + bias + slope[h] * (k - q - (K - Q))     additive bias; ALiBi
    s = -inf                                        where mask is False, or causal and k > q + K - Q
    y = exp(s) / (sum over k of exp(s) + exp(sink[h]))

The last query sees the last key, however many keys come before. A row without any key that counts gives zeros, not nan.

Source: Vaswani et al. (arXiv 1706.03762); ALiBi: Press et al. (arXiv 2108.12409); softcap: Gemma 2 (arXiv 2408.00118); sinks: a
learned logit per head that takes probability away (arXiv 2309.17453, section 3.2; in this form: the gpt-oss model card).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oslo_engine.errors import UnsupportedError
from oslo_engine.kernels.dispatch import require, runs_triton, widen


def scale_mask_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """Scale, bias, mask and normalise the last dimension.

    Args:
        scores: [B, H, Q, K]; fp32, bf16, fp16 (or fp64, by the reference); any strides.
        mask: bool, True = attend, broadcasts to the scores.
        bias: floats, broadcast to the scores: relative positions, or an additive mask.
        alibi_slopes: [H]; no gradient.
        sinks: [H].
        causal: whether a query sees no later keys.
        softcap: bound of the scaled scores; 0 for none.

    Returns:
        [B, H, Q, K] of the scores' dtype, contiguous.

    Raises:
        UnsupportedError: alibi_slopes require gradients.

    Saved for backward: the result, with a softcap the scores, with sinks their share of each row. The gradient of a bias that
    is broadcast over many rows is summed by one program per row of the bias: right, and slow for a bias of a single row.
    """
    return torch.ops.oslo_engine.scale_mask_softmax(scores, mask, bias, alibi_slopes, sinks, scale, causal, softcap)[0]


def reference(
    x: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Probabilities, and the share of the sinks [B, H, Q] (empty without)."""
    s = _masked_scores(x, mask, bias, slopes, scale, causal, softcap)
    bottom = s.new_full((*s.shape[:-1], 1), -torch.inf)
    sink = bottom if sinks is None else widen(sinks)[:, None, None].expand_as(bottom)
    top = torch.cat((s, sink), -1).amax(-1, keepdim=True)
    level = torch.where(top == -torch.inf, 0, top)  # -inf - -inf would be nan
    weights, taken = torch.exp(s - level), torch.exp(sink - level)
    total = weights.sum(-1, keepdim=True) + taken
    total = torch.where(total == 0, 1, total)
    share = (taken / total).squeeze(-1) if sinks is not None else total.new_empty(0)
    return (weights / total).to(x.dtype).contiguous(), share


def _masked_scores(
    x: Tensor, mask: Tensor | None, bias: Tensor | None, slopes: Tensor | None, scale: float, causal: bool, softcap: float
) -> Tensor:
    num_queries, num_keys = x.shape[-2:]
    key = torch.arange(num_keys, device=x.device)
    distance = key - torch.arange(num_keys - num_queries, num_keys, device=x.device).unsqueeze(-1)
    s = widen(x) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + widen(bias)
    if slopes is not None:
        s = s + widen(slopes)[:, None, None] * distance
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    return s.masked_fill(distance > 0, -torch.inf) if causal else s


def reference_backward(
    dy: Tensor, y: Tensor, x: Tensor | None, share: Tensor, scale: float, softcap: float, bias_shape: Sequence[int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scores, bias and sinks.

    With d = sum over k of y * dy:  ds = y * (dy - d), which is the bias's;  dx = ds * scale * (1 - tanh^2);
    dsink = -(its share) * d, summed over batch and queries.
    """
    wide = widen(y)
    drift = (wide * widen(dy)).sum(-1, keepdim=True)
    ds = wide * (widen(dy) - drift)
    dx = ds * scale
    if x is not None:
        dx = torch.where(ds == 0, 0, dx * (1 - torch.tanh(widen(x) * (scale / softcap)).square()))
    dbias = ds.new_empty(0) if bias_shape is None else ds.sum_to_size(bias_shape).clone()
    return dx.to(y.dtype).contiguous(), dbias, _sink_gradient(share, drift.squeeze(-1))


def _sink_gradient(share: Tensor, drift: Tensor) -> Tensor:
    return -(share * drift).sum((0, 2)) if share.dim() == 3 else share.new_empty(0)


def _check(
    x: Tensor, mask: Tensor | None, bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None, softcap: float
) -> None:
    name = "scale_mask_softmax"
    fits = x.dim() == 4 and x.is_floating_point()
    require(fits, "scores must be [B, H, Q, K] of floats", where=name, got=f"{x.dtype} {tuple(x.shape)}")
    require(softcap >= 0, "softcap must not be negative", where=name, got=softcap)
    if mask is not None:
        require(mask.dtype == torch.bool, "mask must be bool; pass an additive one as bias", where=name, got=mask.dtype)
    for what, given in (("mask", mask), ("bias", bias)):
        if given is not None:
            fits = given.dim() <= 4
            fits = fits and all(a in (1, b) for a, b in zip(reversed(given.shape), reversed(x.shape), strict=False))
            require(fits, f"{what} does not broadcast", where=name, expected=tuple(x.shape), got=tuple(given.shape))
    for what, given in (("alibi_slopes", slopes), ("sinks", sinks)):
        if given is not None:
            fits = given.shape == x.shape[1:2]
            require(fits, f"{what} must have a number per head", where=name, expected=(x.shape[1],), got=tuple(given.shape))


@torch.library.custom_op("oslo_engine::scale_mask_softmax", mutates_args=())
def _scale_mask_softmax(
    x: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    _check(x, mask, bias, slopes, sinks, softcap)
    if runs_triton(x):
        from oslo_engine.kernels.gpu import scale_mask_softmax as gpu

        return gpu.forward(x, mask, bias, slopes, sinks, scale, causal, softcap)
    return reference(x, mask, bias, slopes, sinks, scale, causal, softcap)


@_scale_mask_softmax.register_fake
def _(
    x: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    _check(x, mask, bias, slopes, sinks, softcap)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(0 if sinks is None else x.shape[:-1], dtype=dtype)


@torch.library.custom_op("oslo_engine::scale_mask_softmax_backward", mutates_args=())
def _scale_mask_softmax_backward(
    dy: Tensor, y: Tensor, x: Tensor | None, share: Tensor, scale: float, softcap: float, bias_shape: Sequence[int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the scores in their dtype, of bias and sinks in fp32 (empty unless wanted).

    Args:
        x: scores, where there is a softcap.
        share: of the sinks; empty unless their gradient is wanted.
        bias_shape: four sizes, or None unless its gradient is wanted.
    """
    if runs_triton(y):
        from oslo_engine.kernels.gpu import scale_mask_softmax as gpu

        dx, dbias, drift = gpu.backward(dy, y, x, scale, softcap, bias_shape, share.dim() == 3)
        return dx, dbias, _sink_gradient(share, drift)
    return reference_backward(dy, y, x, share, scale, softcap, bias_shape)


@_scale_mask_softmax_backward.register_fake
def _(
    dy: Tensor, y: Tensor, x: Tensor | None, share: Tensor, scale: float, softcap: float, bias_shape: Sequence[int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = share.new_empty(0 if bias_shape is None else bias_shape)
    return y.new_empty(y.shape), dbias, share.new_empty(share.shape[1] if share.dim() == 3 else 0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, bias, _, sinks, ctx.scale, _, ctx.softcap = inputs
    if ctx.needs_input_grad[3]:
        raise UnsupportedError("the softmax kernel has no gradient of alibi_slopes", hint="they are constants: detach them")
    y, share = output
    ctx.save_for_backward(y, x if ctx.softcap else None, share)
    ctx.mark_non_differentiable(share)
    ctx.bias, ctx.sink_dtype = None if bias is None else (bias.shape, bias.dtype), None if sinks is None else sinks.dtype


def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    y, x, share = ctx.saved_tensors
    want_bias, want_sinks = ctx.needs_input_grad[2], ctx.needs_input_grad[4]
    shape = [1] * (4 - len(ctx.bias[0])) + list(ctx.bias[0]) if want_bias else None
    share = share if want_sinks else share.new_empty(0)
    backward = torch.ops.oslo_engine.scale_mask_softmax_backward
    dx, dbias, dsinks = backward(dy, y, x, share, ctx.scale, ctx.softcap, shape)
    dbias = dbias.reshape(ctx.bias[0]).to(ctx.bias[1]) if want_bias else None
    return dx, None, dbias, None, dsinks.to(ctx.sink_dtype) if want_sinks else None, None, None, None


_scale_mask_softmax.register_autograd(_backward, setup_context=_setup)
