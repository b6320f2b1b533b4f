"""Root mean square normalisation, alone or of a sum with the residual stream.

    y = h / sqrt(mean(h^2) + eps) * (shift + weight)         h = x, or x + residual

``shift`` is 0 in most models and 1 where weights are stored as their distance from 1.

Source: Zhang, Sennrich (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.kernels.dispatch import require, runs_triton, widen


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, shift: float = 0.0) -> Tensor:
    """Normalise the last dimension.

    Args:
        x: [.., N]; fp32, bf16, fp16 (or fp64, by the reference); any strides.
        weight: [N], of any of these dtypes, or None for 1.
        shift: added to the weight.

    Returns:
        [.., N] of x's dtype, contiguous.

    Saved for backward: x, weight, and 1 / root mean square of each row in fp32.
    """
    return torch.ops.oslo_engine.rms_norm(x, weight, eps, shift)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum.

    Args:
        x, residual: [.., N], the same shape. Their dtypes may differ: the sum has the wider one.
        weight, shift: as in ``rms_norm``.

    Returns:
        The normalised sum and the sum itself, both of the sum's dtype. The norm is that of the sum as it is stored.

    Saved for backward: the sum (which is an output), weight, and one number a row.
    """
    return torch.ops.oslo_engine.add_rms_norm(x, residual, weight, eps, shift)[:2]


def reference(h: Tensor, weight: Tensor | None, eps: float, shift: float) -> tuple[Tensor, Tensor]:
    """[.., N] -> y [.., N], 1 / root mean square [..]."""
    wide = widen(h)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * rstd
    if weight is not None:
        y = y * (widen(weight) + shift)
    return y.to(h.dtype).contiguous(), rstd.squeeze(-1)


def reference_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor, shift: float, want_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of h and weight.

    With n = h * rstd and g = dy * (shift + weight):  dh += rstd * (g - n * mean(g * n)).
    """
    wide, scale = widen(dy), rstd.unsqueeze(-1)
    normed = widen(h) * scale
    grad = wide if weight is None else wide * (widen(weight) + shift)
    dx = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + widen(dh)
    dweight = (wide * normed).reshape(rstd.numel(), h.shape[-1]).sum(0) if want_weight else rstd.new_empty(0)
    return dx.to(h.dtype).contiguous(), dweight


def _check(name: str, h: Tensor, weight: Tensor | None) -> None:
    require(h.dim() > 0 and h.is_floating_point(), "x must be [.., N] of floats", where=name, got=f"{h.dtype} {tuple(h.shape)}")
    if weight is not None:
        fits = weight.shape == h.shape[-1:]
        require(fits, "weight does not fit x", where=name, expected=tuple(h.shape[-1:]), got=tuple(weight.shape))


def _check_sum(x: Tensor, residual: Tensor, weight: Tensor | None) -> None:
    _check("add_rms_norm", x, weight)
    fits = x.shape == residual.shape
    require(fits, "residual does not fit x", where="add_rms_norm", expected=tuple(x.shape), got=tuple(residual.shape))


@torch.library.custom_op("oslo_engine::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, shift: float) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight)
    if runs_triton(x):
        from oslo_engine.kernels.gpu import rms_norm as gpu

        y, _, rstd = gpu.forward(x, None, weight, eps, shift)
        return y, rstd
    return reference(x, weight, eps, shift)


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, shift: float) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight)
    return x.new_empty(x.shape), _statistic(x)


def _statistic(h: Tensor) -> Tensor:
    return h.new_empty(h.shape[:-1], dtype=torch.promote_types(h.dtype, torch.float32))


@torch.library.custom_op("oslo_engine::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, shift: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check_sum(x, residual, weight)
    if runs_triton(x) and runs_triton(residual):
        from oslo_engine.kernels.gpu import rms_norm as gpu

        return gpu.forward(x, residual, weight, eps, shift)
    h = (x + residual).contiguous()
    y, rstd = reference(h, weight, eps, shift)
    return y, h, rstd


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, shift: float) -> tuple[Tensor, Tensor, Tensor]:
    _check_sum(x, residual, weight)
    h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return h, torch.empty_like(h), _statistic(h)


@torch.library.custom_op("oslo_engine::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor, shift: float, want_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of h in its dtype, of weight in fp32 (empty unless wanted)."""
    if runs_triton(h):
        from oslo_engine.kernels.gpu import rms_norm as gpu

        return gpu.backward(dy, dh, h, weight, rstd, shift, want_weight)
    return reference_backward(dy, dh, h, weight, rstd, shift, want_weight)


@_rms_norm_backward.register_fake
def _(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor, shift: float, want_weight: bool
) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), rstd.new_empty(h.shape[-1] if want_weight else 0)


def _save(ctx: Any, h: Tensor, weight: Tensor | None, shift: float, rstd: Tensor) -> None:
    ctx.save_for_backward(h, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.shift = shift


def _gradients(ctx: Any, dy: Tensor | None, dh: Tensor | None, want_weight: bool) -> tuple[Tensor, Tensor | None]:
    h, weight, rstd = ctx.saved_tensors
    dy = torch.zeros_like(h) if dy is None else dy
    dx, dweight = torch.ops.oslo_engine.rms_norm_backward(dy, dh, h, weight, rstd, ctx.shift, want_weight)
    return dx, dweight.to(weight.dtype) if want_weight else None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, shift = inputs
    _save(ctx, x, weight, shift, output[1])


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, dy, None, ctx.needs_input_grad[1]), None, None


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, _, shift = inputs
    ctx.dtypes = x.dtype, residual.dtype
    _save(ctx, output[1], weight, shift, output[2])


def _backward_sum(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    dx, dweight = _gradients(ctx, dy, dh, ctx.needs_input_grad[2])
    return dx.to(ctx.dtypes[0]), dx.to(ctx.dtypes[1]), dweight, None, None


_rms_norm.register_autograd(_backward, setup_context=_setup)
_add_rms_norm.register_autograd(_backward_sum, setup_context=_setup_sum)
