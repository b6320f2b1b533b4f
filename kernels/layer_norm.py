"""Layer normalisation, alone or of a sum with the residual stream.

    y = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias         h = x, or x + residual

Source: Ba, Kiros, Hinton (arXiv 1607.06450); the variance is the biased one, as torch has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.kernels.dispatch import require, runs_triton, widen


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise the last dimension.

    Args:
        x: [.., N]; fp32, bf16, fp16 (or fp64, by the reference); any strides.
        weight, bias: [N], of any of these dtypes, or None.

    Returns:
        [.., N] of x's dtype, contiguous.

    Saved for backward: x, weight, and mean and 1 / deviation of each row in fp32.
    """
    return torch.ops.oslo_engine.layer_norm(x, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum.

    Args:
        x, residual: [.., N], the same shape. Their dtypes may differ: the sum has the wider one.
        weight, bias: as in ``layer_norm``.

    Returns:
        The normalised sum and the sum itself, both of the sum's dtype. The norm is that of the sum as it is stored.

    Saved for backward: the sum (which is an output), weight, and two numbers a row.
    """
    return torch.ops.oslo_engine.add_layer_norm(x, residual, weight, bias, eps)[:2]


def reference(h: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """[.., N] -> y [.., N], mean [..], 1 / deviation [..]."""
    wide = widen(h)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * widen(weight)
    if bias is not None:
        y = y + widen(bias)
    return y.to(h.dtype).contiguous(), mean.squeeze(-1), rstd.squeeze(-1)


def reference_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, want_parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h, weight and bias.

    With n = (h - mean) * rstd and g = dy * weight:  dh += rstd * (g - mean(g) - n * mean(g * n)).
    """
    wide, scale = widen(dy), rstd.unsqueeze(-1)
    normed = (widen(h) - mean.unsqueeze(-1)) * scale
    grad = wide if weight is None else wide * widen(weight)
    dx = scale * (grad - grad.mean(-1, keepdim=True) - normed * (grad * normed).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + widen(dh)
    dx = dx.to(h.dtype).contiguous()
    if not want_parameters:
        return dx, wide.new_empty(0), wide.new_empty(0)
    dims = tuple(range(h.dim() - 1))
    return dx, (wide * normed).sum(dims) if dims else wide * normed, wide.sum(dims) if dims else wide.clone()


def _check(name: str, h: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    require(h.dim() > 0 and h.is_floating_point(), "x must be [.., N] of floats", where=name, got=f"{h.dtype} {tuple(h.shape)}")
    for what, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            fits = parameter.shape == h.shape[-1:]
            require(fits, f"{what} does not fit x", where=name, expected=tuple(h.shape[-1:]), got=tuple(parameter.shape))


@torch.library.custom_op("oslo_engine::layer_norm", mutates_args=())
def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _check("layer_norm", x, weight, bias)
    if runs_triton(x):
        from oslo_engine.kernels.gpu import layer_norm as gpu

        y, _, mean, rstd = gpu.forward(x, None, weight, bias, eps)
        return y, mean, rstd
    return reference(x, weight, bias, eps)


@_layer_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _check("layer_norm", x, weight, bias)
    return x.new_empty(x.shape), _statistic(x), _statistic(x)


def _statistic(h: Tensor) -> Tensor:
    return h.new_empty(h.shape[:-1], dtype=torch.promote_types(h.dtype, torch.float32))


@torch.library.custom_op("oslo_engine::add_layer_norm", mutates_args=())
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_sum(x, residual, weight, bias)
    if runs_triton(x) and runs_triton(residual):
        from oslo_engine.kernels.gpu import layer_norm as gpu

        return gpu.forward(x, residual, weight, bias, eps)
    h = (x + residual).contiguous()
    y, mean, rstd = reference(h, weight, bias, eps)
    return y, h, mean, rstd


@_add_layer_norm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_sum(x, residual, weight, bias)
    h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return h, torch.empty_like(h), _statistic(h), _statistic(h)


def _check_sum(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    _check("add_layer_norm", x, weight, bias)
    fits = x.shape == residual.shape
    require(fits, "residual does not fit x", where="add_layer_norm", expected=tuple(x.shape), got=tuple(residual.shape))


@torch.library.custom_op("oslo_engine::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, want_parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h in its dtype, of weight and bias in fp32 (empty unless wanted)."""
    if runs_triton(h):
        from oslo_engine.kernels.gpu import layer_norm as gpu

        return gpu.backward(dy, dh, h, weight, mean, rstd, want_parameters)
    return reference_backward(dy, dh, h, weight, mean, rstd, want_parameters)


@_layer_norm_backward.register_fake
def _(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, want_parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    length = h.shape[-1] if want_parameters else 0
    return h.new_empty(h.shape), mean.new_empty(length), mean.new_empty(length)


def _save(ctx: Any, h: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> None:
    ctx.save_for_backward(h, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(
    ctx: Any, dy: Tensor | None, dh: Tensor | None, parameters: slice
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    h, weight, mean, rstd = ctx.saved_tensors
    dy = torch.zeros_like(h) if dy is None else dy
    want_weight, want_bias = ctx.needs_input_grad[parameters]
    backward = torch.ops.oslo_engine.layer_norm_backward
    dx, dweight, dbias = backward(dy, dh, h, weight, mean, rstd, want_weight or want_bias)
    return dx, dweight.to(weight.dtype) if want_weight else None, dbias.to(ctx.bias_dtype) if want_bias else None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    _save(ctx, x, weight, bias, *output[1:])


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, dy, None, slice(1, 3)), None


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _ = inputs
    ctx.dtypes = x.dtype, residual.dtype
    _save(ctx, output[1], weight, bias, *output[2:])


def _backward_sum(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = _gradients(ctx, dy, dh, slice(2, 4))
    return dx.to(ctx.dtypes[0]), dx.to(ctx.dtypes[1]), dweight, dbias, None


_layer_norm.register_autograd(_backward, setup_context=_setup)
_add_layer_norm.register_autograd(_backward_sum, setup_context=_setup_sum)
