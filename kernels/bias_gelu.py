"""GELU of a sum with a bias, in the three forms that models use.

    y = gelu(x + bias)

The forms and their source are in ``oslo_engine.kernels.activation``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.kernels.activation import GELUS, activation, slope
from oslo_engine.kernels.dispatch import require, runs_triton, widen


def bias_gelu(x: Tensor, bias: Tensor | None = None, form: str = "erf") -> Tensor:
    """Add the bias and activate.

    Args:
        x: [.., N]; fp32, bf16, fp16 (or fp64, by the reference); any strides.
        bias: [N], of any of these dtypes, or None.
        form: "erf", "tanh" or "quick".

    Returns:
        [.., N] of x's dtype, contiguous. The sum is not rounded before it is activated.

    Saved for backward: x and bias.
    """
    return torch.ops.oslo_engine.bias_gelu(x, bias, form)


def reference(x: Tensor, bias: Tensor | None, form: str) -> Tensor:
    """[.., N] -> [.., N]."""
    return activation(_summed(x, bias), form).to(x.dtype).contiguous()


def reference_backward(dy: Tensor, x: Tensor, bias: Tensor | None, form: str, want_bias: bool) -> tuple[Tensor, Tensor]:
    """dx = dy * gelu'(x + bias), and its sum over all rows."""
    dx = widen(dy) * slope(_summed(x, bias), form)
    dbias = dx.reshape(x.shape[:-1].numel(), x.shape[-1]).sum(0) if want_bias else dx.new_empty(0)
    return dx.to(x.dtype).contiguous(), dbias


def _summed(x: Tensor, bias: Tensor | None) -> Tensor:
    return widen(x) if bias is None else widen(x) + widen(bias)


def _check(x: Tensor, bias: Tensor | None, form: str) -> None:
    name = "bias_gelu"
    require(x.dim() > 0 and x.is_floating_point(), "x must be [.., N] of floats", where=name, got=f"{x.dtype} {tuple(x.shape)}")
    require(form in GELUS, "no such form of GELU", where=name, expected=GELUS, got=form)
    if bias is not None:
        fits = bias.shape == x.shape[-1:]
        require(fits, "bias does not fit x", where=name, expected=tuple(x.shape[-1:]), got=tuple(bias.shape))


@torch.library.custom_op("oslo_engine::bias_gelu", mutates_args=())
def _bias_gelu(x: Tensor, bias: Tensor | None, form: str) -> Tensor:
    _check(x, bias, form)
    if runs_triton(x):
        from oslo_engine.kernels.gpu import bias_gelu as gpu

        return gpu.forward(x, bias, form)
    return reference(x, bias, form)


@_bias_gelu.register_fake
def _(x: Tensor, bias: Tensor | None, form: str) -> Tensor:
    _check(x, bias, form)
    return x.new_empty(x.shape)


@torch.library.custom_op("oslo_engine::bias_gelu_backward", mutates_args=())
def _bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor | None, form: str, want_bias: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x in its dtype, of the bias in fp32 (empty unless wanted)."""
    if runs_triton(x):
        from oslo_engine.kernels.gpu import bias_gelu as gpu

        return gpu.backward(dy, x, bias, form, want_bias)
    return reference_backward(dy, x, bias, form, want_bias)


@_bias_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor | None, form: str, want_bias: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape[-1] if want_bias else 0, dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.form = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    want_bias = ctx.needs_input_grad[1]
    dx, dbias = torch.ops.oslo_engine.bias_gelu_backward(dy, x, bias, ctx.form, want_bias)
    return dx, dbias.to(bias.dtype) if want_bias else None, None


_bias_gelu.register_autograd(_backward, setup_context=_setup)
