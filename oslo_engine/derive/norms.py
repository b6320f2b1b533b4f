"""Norms, recognised by what they do: scaling what goes in changes nothing, and every feature matters to every other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.derive.calls import Call

_SAME, _OTHER = 2e-3, 1e-2  # relative: above a norm's epsilon, below any real change


def find_norms(modules: Mapping[str, nn.Module], calls: Mapping[str, Call]) -> dict[str, nn.Module]:
    """Those of the modules that normalise over their whole last dimension."""
    return {name: module for name, module in modules.items() if name in calls and _is_norm(module, calls[name])}


def _is_norm(module: nn.Module, call: Call) -> bool:
    if any(
        isinstance(part, nn.Linear) or ((p := getattr(part, "weight", None)) is not None and p.ndim > 2)
        for part in module.modules()
    ):
        return False
    args, kwargs = call.fresh()
    if not args and kwargs:
        name, x = next(iter(kwargs.items()))
        kwargs = {key: value for key, value in kwargs.items() if key != name}
    elif args:
        x, args = args[0], args[1:]
    else:
        return False
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or x.shape[-1] < 2:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    first = torch.zeros_like(x)
    first[..., 0] = 30 * x.shape[-1] ** 0.5

    def apply(value: Tensor) -> Any:
        return module(value, *args, **kwargs)

    try:
        with torch.no_grad():
            y, scaled, other = apply(x), apply(3 * x), apply(x + first)
    except Exception:  # not a module of one tensor
        return False
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return False
    size = y.abs().max()
    mixes = (other - y)[..., -1].abs().max()
    return bool((scaled - y).abs().max() <= _SAME * size) and bool(mixes > _OTHER * size)


def bypass(norm: nn.Module) -> None:
    """Let gradients pass a norm feature by feature (in place); its values stay what they are."""
    forward = norm.forward

    def straight_through(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = forward(x, *args, **kwargs)
        try:
            way = _elementwise(norm, x, (*args, *kwargs.values()))
        except RuntimeError:  # a weight of another shape
            return y
        return y.detach() + (way - way.detach()).to(y.dtype) if way.shape == y.shape else y

    norm.forward = straight_through  # type: ignore[method-assign]


def _elementwise(norm: nn.Module, x: Tensor, others: tuple[Any, ...]) -> Tensor:
    way = x
    for parameter in norm.parameters():
        way = way * (parameter + 1.3)
    for gate in others:
        if isinstance(gate, Tensor) and gate.shape == x.shape and gate.is_floating_point():
            way = way * torch.sigmoid(gate)
    return way
