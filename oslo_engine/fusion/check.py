"""Comparing a kernel with what it stands for, once for each kind of place, before it is put there."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_engine.fusion.classify import difference, tolerance
from oslo_engine.fusion.deferred import Activated, Biased, Scores
from oslo_engine.fusion.rotation import Rotation
from oslo_engine.kernels.activation import activation

_ROWS = 5


def differs(kernel: str, *, size: int, form: str, with_bias: bool, dtype: torch.dtype, device: torch.device) -> str:
    """Run a kernel on random numbers, forward and backward, against torch's own operations in fp64.

    Args:
        kernel: bias_gelu, bias_dropout_residual, glu, scale_mask_softmax, rotary or cross_entropy.
        size: of the last dimension.
        form: of the activation.
        with_bias: whether there is one.

    Returns:
        Why the kernel must not be used here; empty where the two agree.
    """
    make = _Inputs(size, dtype, device)
    try:
        fused, plain, inputs = _PAIRS[kernel](make, form, with_bias)
        got, wanted = _gradients(fused, inputs), _gradients(plain, [each.double() for each in inputs])
    except Exception as error:  # a kernel that does not compile, or does not take this type
        return f"the kernel does not run here: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    off = difference([each.double() for each in got], [*wanted])
    return "" if off <= tolerance(dtype) else f"differs from the original by {off:.1e}"


class _Inputs:
    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.generator = torch.Generator().manual_seed(size)

    def __call__(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self.generator) + 0.3).to(self.dtype).to(self.device)


Pair = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]


def _bias_gelu(make: _Inputs, form: str, with_bias: bool) -> Pair:
    inputs = [make(_ROWS, make.size), *([make(make.size)] if with_bias else [])]

    def fused(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return Activated(x, bias, form, "", torch.clone, composed=True).compute(True)

    return fused, lambda x, bias=None: activation(x if bias is None else x + bias, form), inputs


def _glu(make: _Inputs, form: str, with_bias: bool) -> Pair:
    inputs = [make(_ROWS, make.size), make(_ROWS, make.size), *([make(make.size)] if with_bias else [])]

    def fused(x: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
        return Activated(x, bias, form, "", torch.clone).gate(up)

    return fused, lambda x, up, bias=None: activation(x if bias is None else x + bias, form) * up, inputs


def _bias_dropout_residual(make: _Inputs, form: str, with_bias: bool) -> Pair:
    inputs = [make(_ROWS, make.size), make(_ROWS, make.size), *([make(make.size)] if with_bias else [])]

    def fused(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return Biased(x, bias, "").join(residual)

    return fused, lambda x, residual, bias=None: residual + (x if bias is None else x + bias), inputs


def _scale_mask_softmax(make: _Inputs, form: str, with_bias: bool) -> Pair:
    inputs = [make(2, 3, _ROWS, 7), make(2, 1, _ROWS, 7)]

    def fused(x: Tensor, bias: Tensor) -> Tensor:
        return Scores(x, x.dtype, scale=0.25, bias=bias).softmax()

    return fused, lambda x, bias: torch.softmax(x * 0.25 + bias, -1), inputs


def _rotary(make: _Inputs, form: str, with_bias: bool) -> Pair:
    angles = make(2, 1, _ROWS, 3).double()
    tables = [torch.cat((each, each), -1).to(make.dtype) for each in (angles.cos(), angles.sin())]

    def plain(x: Tensor) -> Tensor:
        return x * tables[0].double() + torch.cat((-x[..., 3:], x[..., :3]), -1) * tables[1].double()

    return lambda x: Rotation(x, *tables).turn(), plain, [make(2, 3, _ROWS, 6)]


def _cross_entropy(make: _Inputs, form: str, with_bias: bool) -> Pair:
    from oslo_engine.kernels.cross_entropy import cross_entropy

    target = torch.arange(_ROWS, device=make.device) % make.size
    target[1] = -100
    return lambda x: cross_entropy(x, target), lambda x: F.cross_entropy(x, target), [make(_ROWS, make.size)]


_PAIRS: dict[str, Callable[[_Inputs, str, bool], Pair]] = {
    "bias_gelu": _bias_gelu,
    "bias_dropout_residual": _bias_dropout_residual,
    "glu": _glu,
    "scale_mask_softmax": _scale_mask_softmax,
    "rotary": _rotary,
    "cross_entropy": _cross_entropy,
}


def _gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    inputs = [each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        y = function(*inputs)
        grad = torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape).to(y.dtype)
        return [y, *torch.autograd.grad(y, inputs, grad)]
