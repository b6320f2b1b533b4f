"""Values that wait for what happens to them next, so that one kernel can do both.

A ``Deferred`` is a tensor in all but its data: shape, type and device are known, the value is a *recipe*. An operation that
the recipe knows how to take in gives a longer recipe or the result of a kernel (``rules``); any other operation gets the value,
computed as the model's author wrote it. So the model's own Python runs, whatever its control flow, across the borders of its
modules, and what is not recognised is not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_engine.errors import UnsupportedError
from oslo_engine.kernels.activation import GELUS


class Recipe(Protocol):
    """How to compute a value. ``inputs`` are the tensors that it is made of; ``shape`` and ``dtype`` are the value's."""

    @property
    def inputs(self) -> tuple[Tensor, ...]: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def compute(self, kernels: bool) -> Tensor:
        """The value, where nothing could be taken in; with ``kernels`` False by torch's own operations alone."""
        ...


class LikeX:
    """A recipe whose value has the shape and the type of its ``x``."""

    x: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.x,)

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype


class LikeBiasedX(LikeX):
    """The same, made of ``x + bias``."""

    bias: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.x,) if self.bias is None else (self.x, self.bias)

    def biased(self) -> Tensor:
        return self.x if self.bias is None else self.x + self.bias.to(self.x.dtype)


@dataclass(frozen=True)
class Biased(LikeBiasedX):
    """``x + bias``, dropped out where p > 0. ``source`` is the module whose result it is."""

    x: Tensor
    bias: Tensor | None
    source: str
    p: float = 0.0
    seed: Tensor | None = None

    def compute(self, kernels: bool) -> Tensor:
        if self.p and kernels:
            return self.join(None)
        y = self.biased()
        return F.dropout(y, self.p) if self.p else y

    def join(self, residual: Tensor | None) -> Tensor:
        """The kernel's answer."""
        from oslo_engine.kernels.bias_dropout_residual import bias_dropout_residual

        return bias_dropout_residual(self.x, self.bias, residual, self.p, True, self.seed)


@dataclass(frozen=True)
class Activated(LikeBiasedX):
    """``activation(x + bias)``. ``original`` computes it otherwise, in several operations if ``composed``."""

    x: Tensor
    bias: Tensor | None
    form: str
    source: str
    original: Callable[[Tensor], Tensor]
    composed: bool = False

    @property
    def worthwhile(self) -> bool:
        """Whether the kernel does in one step what takes several."""
        return self.form in GELUS and (self.bias is not None or self.composed)

    def compute(self, kernels: bool) -> Tensor:
        if kernels and self.worthwhile:
            from oslo_engine.kernels.bias_gelu import bias_gelu

            return bias_gelu(self.x, self.bias, self.form)
        return self.original(self.biased())

    def gate(self, up: Tensor) -> Tensor:
        """The kernel's answer for ``self * up``."""
        from oslo_engine.kernels.glu import glu

        return glu(self.biased(), up, self.form)


@dataclass(frozen=True)
class Scores:
    """``x * scale``, after which ``softcap * tanh(.)`` if ``capped``, and ``+ bias``: attention scores, [B, H, Q, K]."""

    x: Tensor
    dtype: torch.dtype
    scale: float = 1.0
    capped: bool = False
    softcap: float = 1.0
    bias: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.x,) if self.bias is None else (self.x, self.bias)

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def compute(self, kernels: bool) -> Tensor:
        y = self.x if self.scale == 1.0 else self.x * self.scale
        if self.capped:
            y = torch.tanh(y)
            y = y if self.softcap == 1.0 else y * self.softcap
        return (y if self.bias is None else y + self.bias).to(self.dtype)

    def softmax(self) -> Tensor:
        """The kernel's answer, in x's type."""
        from oslo_engine.kernels.scale_mask_softmax import scale_mask_softmax

        scale = self.scale * self.softcap if self.capped else self.scale
        return scale_mask_softmax(self.x, None, self.bias, scale=scale, softcap=self.softcap if self.capped else 0.0)


@dataclass(frozen=True)
class Shares:
    """Softmax of scores in a wider type than the scores': most models go back to the scores' type at once."""

    scores: Scores
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.scores.inputs

    @property
    def shape(self) -> torch.Size:
        return self.scores.shape

    def compute(self, kernels: bool) -> Tensor:
        if not kernels:
            return torch.softmax(self.scores.compute(False), -1, dtype=self.dtype)
        return replace(self.scores, x=self.scores.x.to(self.dtype)).softmax()


@dataclass(frozen=True)
class Summed:
    """``x + residual`` on its way to a norm, whose kernel computes it too; then it is the value (``Deferred.value``)."""

    x: Tensor
    residual: Tensor
    source: str

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.x, self.residual

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.x.dtype, self.residual.dtype)

    def compute(self, kernels: bool) -> Tensor:
        return self.residual + self.x


# Answered from what is known without the value.
_KNOWN = {"dim", "size", "numel", "is_floating_point", "is_complex", "ndimension", "nelement", "__len__"}
_KNOWN_ATTRIBUTES = {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "is_meta", "is_sparse")
}


class Deferred(Tensor):
    """See the module. Made inside a ``Fusing`` scope, and never seen outside one: a scope gives its caller values.

    Args:
        recipe: what it will be.
        notice: called with the recipe where its value is computed; kernels compute it unless there is one (``probe``).
    """

    recipe: Any
    notice: Callable[[Any], None] | None
    value: Tensor | None
    with_grad: bool

    @staticmethod
    def __new__(cls, recipe: Recipe, notice: Callable[[Any], None] | None = None) -> Deferred:
        with torch._C.DisableTorchFunction():
            made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, recipe.shape, dtype=recipe.dtype, device=recipe.inputs[0].device
            )
            made.recipe, made.notice, made.value, made.with_grad = recipe, notice, None, torch.is_grad_enabled()
        return made

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Deferred({type(self.recipe).__name__})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN_ATTRIBUTES or getattr(func, "__name__", None) in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_valued(args), **_valued(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # An operation that no torch function announced, such as one of C++ or of an autograd.Function.
        raise UnsupportedError("a value that waits for its kernel has no data yet", where=str(func), hint="call model.unfuse()")


def value_of(x: Any) -> Any:
    """The value of a Deferred; anything else as it is.

    Raises:
        UnsupportedError: it is needed inside an ``autograd.Function`` or under ``no_grad``, where its gradient would be lost.
    """
    if not isinstance(x, Deferred):
        return x
    if x.value is None:
        with torch._C.DisableTorchFunction():
            if x.with_grad and not torch.is_grad_enabled() and any(each.requires_grad for each in x.recipe.inputs):
                raise UnsupportedError(
                    "a fused value is read where gradients are off, so it would lose its own",
                    where=type(x.recipe).__name__,
                    hint="leave this module out of the targets of fuse()",
                )
            if x.notice is not None:
                x.notice(x.recipe)
            with torch.set_grad_enabled(x.with_grad):
                x.value = x.recipe.compute(x.notice is None)
    return x.value


def _valued(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value_of(value)
    if isinstance(value, dict):
        return {key: _valued(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(*map(_valued, value)) if hasattr(value, "_fields") else type(value)(map(_valued, value))
    return value


def values_of(value: Any) -> Any:
    """The same for all tensors in tuples, lists and dicts; an object without a Deferred is handed through as it is."""
    return _valued(value) if _waits(value) else value


def _waits(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_waits, value.values()))
    return any(map(_waits, value)) if isinstance(value, (tuple, list)) else isinstance(value, Deferred)


def is_plain(x: Any) -> bool:
    """An ordinary tensor, not a subclass with a behaviour of its own (a slice of a vocabulary, a DTensor)."""
    return type(x) is Tensor or type(x) is nn.Parameter


def recipe_of(x: Any, kind: type) -> Any:
    """The recipe of a Deferred of this kind whose value nobody needed so far; else None."""
    return x.recipe if isinstance(x, Deferred) and x.value is None and type(x.recipe) is kind else None
