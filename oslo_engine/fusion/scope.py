"""Scopes in which values may wait, and the modules that make them wait.

A scope is a module, mostly a block: while its forward runs, a torch function mode applies the ``rules``. It lies inside
activation checkpointing, so that recomputation takes the same way, and it hands out values only.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from oslo_engine.fusion.deferred import (
    Activated,
    Biased,
    Deferred,
    Recipe,
    Summed,
    is_plain,
    recipe_of,
    value_of,
    values_of,
)
from oslo_engine.fusion.rules import RULES, activate, autocasting
from oslo_engine.layers.region import RowLayer

_running = threading.local()


class Fusing(TorchFunctionMode):
    """Applies the rules to the torch functions called inside.

    Args:
        attends: whether attention scores may wait.
        gates: whether activations may wait for a factor.
        rotates: whether products with cosines may wait for those with sines.
        loses: whether cross-entropy is the kernel's.
    """

    def __init__(self, *, attends: bool = False, gates: bool = False, rotates: bool = False, loses: bool = False) -> None:
        super().__init__()
        self.attends, self.gates, self.rotates, self.loses = attends, gates, rotates, loses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = RULES.get(getattr(func, "__name__", ""))
        if rule is not None and not torch.compiler.is_compiling():
            try:
                answer = rule(self, *args, **(kwargs or {}))
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise
                answer = NotImplemented  # called in a way that the rule does not know
            if answer is not NotImplemented:
                return answer
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Fusing:
        super().__enter__()
        self._outer = current()
        _running.scope = self
        return self

    def __exit__(self, *error: Any) -> None:
        _running.scope = self._outer
        super().__exit__(*error)

    def defer(self, recipe: Recipe) -> Deferred:
        return Deferred(recipe)

    def activated(self, recipe: Activated) -> Tensor:
        return self.defer(recipe) if self.gates else recipe.compute(True)

    def emit(self, kernel: str, source: str, fused: Callable[[], Any], plain: Callable[[], Any]) -> Any:
        """The result of a kernel. ``plain`` computes the same from torch's own operations."""
        return fused()


def current() -> Fusing | None:
    """The scope that is running in this thread. None under torch.compile, whose compiler does all this by itself."""
    return None if torch.compiler.is_compiling() else getattr(_running, "scope", None)


class Fused:
    """What all mixins here share: a model is copied as it is, and pickled as the plain model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = next(cls for cls in type(self).__mro__[1:] if issubclass(cls, nn.Module))
        return _new, (plain,), {key: value for key, value in self.__dict__.items() if not key.startswith("_oslo_fused")}


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


class Scope(Fused):
    """A module in whose forward values may wait."""

    _oslo_fused_kinds: dict[str, bool]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or current() is not None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with self._make_scope():
            return values_of(super().forward(*args, **kwargs))  # type: ignore[misc]

    def _make_scope(self) -> Fusing:
        return Fusing(**self._oslo_fused_kinds)


class BiasApart(Fused):
    """A linear layer whose bias is added by the kernel that comes next."""

    _oslo_fused_source: str
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        scope = current()
        if scope is None:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        x = value_of(x)
        if isinstance(self, RowLayer):
            y = self.summed(x)
        elif isinstance(self, Conv1D):
            y = torch.matmul(x, self.weight)
        else:
            y = F.linear(x, self.weight)
        if is_plain(y):
            return scope.defer(Biased(y, self.bias, self._oslo_fused_source))
        return y if self.bias is None else y + self.bias


class DropLater(Fused):
    """A dropout whose mask is drawn where the residual is added."""

    _oslo_fused_source: str

    def forward(self, x: Tensor) -> Tensor:
        scope = current()
        if scope is not None and is_plain(x):
            x = scope.defer(Biased(x, None, self._oslo_fused_source))
        return super().forward(x)  # type: ignore[misc, no-any-return]


class Activation(Fused):
    """An activation that may take a bias, and wait for a factor."""

    _oslo_fused_source: str
    _oslo_fused_form: str
    _oslo_fused_composed: bool

    def forward(self, x: Tensor) -> Tensor:
        scope, own = current(), super().forward  # type: ignore[misc]
        if scope is None:
            return own(x)  # type: ignore[no-any-return]
        return activate(scope, x, self._oslo_fused_form, self._oslo_fused_source, own, self._oslo_fused_composed)  # type: ignore[no-any-return]


class Norm(Fused):
    """A norm of the last dimension; with ``kind`` "layer_norm" or "rms_norm". It needs no scope."""

    _oslo_fused_source: str
    _oslo_fused_kind: str
    _oslo_fused_eps: float
    _oslo_fused_shift: float
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        own: Callable[..., Tensor] = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling() or autocasting(x) or not self._takes(x):
            return own(value_of(x))
        scope, summed = current(), recipe_of(x, Summed)
        if scope is None:
            return self._alone(x)
        if summed is None or summed.x.dtype != summed.residual.dtype:
            x = value_of(x)
            return scope.emit(self._oslo_fused_kind, self._oslo_fused_source, lambda: self._alone(x), lambda: own(x))  # type: ignore[no-any-return]

        def joined() -> Tensor:
            y, x.value = self._of_sum(summed.x, summed.residual)  # type: ignore[attr-defined]
            return y

        return scope.emit(f"add_{self._oslo_fused_kind}", summed.source, joined, lambda: own(value_of(x)))  # type: ignore[no-any-return]

    def _takes(self, x: Any) -> bool:
        return (is_plain(x) or isinstance(x, Deferred)) and self.weight.dtype == x.dtype

    def _alone(self, x: Tensor) -> Tensor:
        if self._oslo_fused_kind == "layer_norm":
            from oslo_engine.kernels.layer_norm import layer_norm

            return layer_norm(x, self.weight, getattr(self, "bias", None), self._oslo_fused_eps)
        from oslo_engine.kernels.rms_norm import rms_norm

        return rms_norm(x, self.weight, self._oslo_fused_eps, self._oslo_fused_shift)

    def _of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self._oslo_fused_kind == "layer_norm":
            from oslo_engine.kernels.layer_norm import add_layer_norm

            return add_layer_norm(x, residual, self.weight, getattr(self, "bias", None), self._oslo_fused_eps)
        from oslo_engine.kernels.rms_norm import add_rms_norm

        return add_rms_norm(x, residual, self.weight, self._oslo_fused_eps, self._oslo_fused_shift)


class FusedLoss:
    """A loss function whose cross-entropy is the kernel's. ``was_set``: whether the model had one that was not its class's."""

    def __init__(self, original: Callable[..., Any], *, was_set: bool = False) -> None:
        self.original, self.was_set = original, was_set

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or current() is not None:
            return self.original(*args, **kwargs)
        with Fusing(loses=True):
            return values_of(self.original(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedLoss:
        return type(self)(copy.deepcopy(self.original, memo), was_set=self.was_set)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self.original,)


def _itself(value: Any) -> Any:
    return value
