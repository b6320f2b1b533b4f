"""Linear layers whose weight gradient can be put off: the backward of a zero-bubble pipeline in two halves.

The first half computes what the previous stage waits for, the gradient of the input; the second half, the gradient of the
weights, fills time in which a rank would wait. A forward inside ``deferrable`` prepares for that, and a backward inside
``collect_weight_gradients`` does it; everywhere else these layers are the ordinary ones. Only the weight is put off: biases
cost little, and everything that communicates runs once, in the first half.

Source: Zero Bubble Pipeline Parallelism (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class WeightGradient:
    """A gradient still to be computed. It keeps the layer's input and output gradient alive until then."""

    weight: Tensor
    compute: Callable[[], Tensor]


# For the process, not per thread: on a GPU the backward, and the forward that it recomputes, run in autograd's own threads.
_deferrable = False
_queue: list[WeightGradient] | None = None


@contextmanager
def deferrable() -> Iterator[None]:
    """Forwards inside make graphs whose weight gradients can be put off."""
    global _deferrable
    outer, _deferrable = _deferrable, True
    try:
        yield
    finally:
        _deferrable = outer


@contextmanager
def collect_weight_gradients() -> Iterator[list[WeightGradient]]:
    """Open a queue: backward passes inside put weight gradients into it instead of giving them to autograd."""
    global _queue
    outer, _queue = _queue, []
    try:
        yield _queue
    finally:
        _queue = outer


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``. Args: x [..., in], weight [out, in], bias [out]. Returns: [..., out]."""
    if not _can_be_deferred(weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, _autocast_dtype(x))


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What transformers' ``Conv1D`` computes. Args: x [..., in], weight [in, out], bias [out]. Returns: [..., out]."""
    if not _can_be_deferred(weight):
        return _project(x, weight, bias)
    return _Conv1D.apply(x, weight, bias, _autocast_dtype(x))


class DeferredLinear(nn.Linear):
    """``nn.Linear`` whose weight gradient can be put off; an existing one becomes this by changing its class."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class DeferredConv1D(Conv1D):
    """transformers' ``Conv1D`` whose weight gradient can be put off; an existing one becomes this by changing its class."""

    def forward(self, x: Tensor) -> Tensor:
        return conv1d(x, self.weight, self.bias)


def _can_be_deferred(weight: Tensor) -> bool:
    """Gradients of computed weights (cast, summed over ranks, adapted) belong to their graph; hooks want theirs in backward."""
    return (
        (_deferrable or _queue is not None)
        and torch.is_grad_enabled()
        and weight.requires_grad
        and weight.is_leaf
        and not weight._backward_hooks
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
    )


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    if not torch.is_autocast_enabled(device) or not x.is_floating_point() or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return y.view(*x.shape[:-1], weight.shape[-1])


class _Deferrable(Function):
    """Shared by the two layouts. Casts happen inside, so that the gradient that is put off is the parameter's own."""

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
        """Args: gradient [rows, out], x [rows, in]."""
        raise NotImplementedError

    @classmethod
    def run_forward(cls, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        ctx.dtype, ctx.x_dtype, ctx.bias_dtype = dtype, x.dtype, None if bias is None else bias.dtype
        ctx.leaf = weight  # what is saved comes back as another object where it was recomputed
        x = x if dtype is None else x.to(dtype)
        ctx.save_for_backward(x, weight)
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        return cls.product(x, weight, bias)

    @classmethod
    def run_backward(cls, ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if for_x:
            grad_x = cls.input_gradient(gradient, weight if ctx.dtype is None else weight.to(ctx.dtype)).to(ctx.x_dtype)
        if for_bias:
            grad_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
        if for_weight:

            @torch.no_grad()  # it may run where the user has gradients enabled
            def compute() -> Tensor:
                rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
                return cls.weight_gradient(*rows).to(weight.dtype)

            if _queue is None:
                grad_weight = compute()
            else:
                _queue.append(WeightGradient(ctx.leaf, compute))
        return grad_x, grad_weight, grad_bias, None


class _Linear(_Deferrable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        return _Linear.run_forward(ctx, x, weight, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Linear.run_backward(ctx, gradient)

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.t() @ x


class _Conv1D(_Deferrable):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        return _Conv1D.run_forward(ctx, x, weight, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Conv1D.run_backward(ctx, gradient)

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _project(x, weight, bias)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight.t()

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
        return x.t() @ gradient
