"""Calls of modules: what they were given and what they returned, kept so that they can be repeated alone."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Call:
    """One call of a module.

    args, kwargs: copies of what it was given, without a graph.
    output: what it returned, without a graph.
    differentiable: names of the arguments through which gradients flowed in that run.
    handed_on: names of the arguments that another of the observed modules had returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    differentiable: frozenset[str]
    handed_on: frozenset[str] = frozenset()

    def fresh(self, *, grad: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments anew; with ``grad`` every floating-point tensor in them collects gradients."""

        def renew(value: Any) -> Any:
            if isinstance(value, Tensor):
                value = value.detach().clone()
                return value.requires_grad_() if grad and value.is_floating_point() else value
            return value if isinstance(value, _PLAIN) else _copied(value)

        args, kwargs = pytree.tree_map(renew, (self.args, self.kwargs))
        return args, kwargs

    def flowing(self, module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments anew; those through which gradients flowed collect them."""
        args, kwargs = self.fresh()
        for name, value in named_arguments(module, args, kwargs).items():
            if name in self.differentiable:
                for tensor in tensors_of(value):
                    tensor.requires_grad_()
        return args, kwargs


class Stop(Exception):
    """Ends a run when all that was wanted has been seen."""


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional arguments of a module's forward."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return tuple(p.name for p in parameters if p.name != "self" and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(argument_names(module), args, strict=False)), **kwargs}


def tensors_of(value: Any) -> list[Tensor]:
    """The floating-point tensors in a structure, also those in objects that torch does not open (caches are left alone)."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def frozen(value: Any) -> Any:
    """A structure's copy without graph; objects that are no tensors are copied too."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        return leaf if isinstance(leaf, _PLAIN) else _copied(leaf)

    return pytree.tree_map(copied, value)


def _copied(thing: Any) -> Any:
    """A copy of an object (a cache) with all tensors in it, which lose their graph."""
    memo: dict[int, Any] = {}
    seen: set[int] = set()
    inside = [thing]
    while inside:
        one = inside.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            memo[id(one)] = one.detach().clone()
        elif isinstance(one, dict):
            inside += one.values()
        elif isinstance(one, (list, tuple, set)):
            inside += one
        elif hasattr(one, "__dict__") and not isinstance(one, (type, nn.Module)):
            inside += vars(one).values()
    return copy.deepcopy(thing, memo)


def forget_graph(model: nn.Module) -> None:
    """Detach the states that modules keep as attributes: a module that holds a tensor with a graph cannot be copied."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                setattr(module, name, value.detach())


@contextmanager
def observed(modules: dict[str, nn.Module]) -> Iterator[dict[str, Call]]:
    """Within: the first call of each of these modules that returns is put into the dict that is given."""
    calls: dict[str, Call] = {}
    open_calls: dict[str, list[tuple[Any, Any, frozenset[str], frozenset[str]]]] = {}
    returned: dict[int, Tensor] = {}
    hooks = []

    def watch(name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if name in calls:
                return
            named = named_arguments(module, args, kwargs)
            flows = frozenset(key for key, value in named.items() if any(x.requires_grad for x in tensors_of(value)))
            handed = frozenset(key for key, value in named.items() if any(id(x) in returned for x in tensors_of(value)))
            open_calls.setdefault(name, []).append((frozen(tuple(args)), frozen(dict(kwargs)), flows, handed))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            returned.update((id(tensor), tensor) for tensor in tensors_of(output))
            if name not in calls:
                given, named, flows, handed = open_calls[name].pop()
                calls[name] = Call(given, named, frozen(output), flows, handed)

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(after, with_kwargs=True))

    for name, module in modules.items():
        watch(name, module)
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def repeat(module: nn.Module, call: Call, *, grad: bool = False) -> Any:
    """Run a module as it was called; the same random numbers each time. What it returns, None where a hook stopped it."""
    return repeat_with(module, *call.fresh(grad=grad))


def repeat_with(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return module(*args, **kwargs)
        except Stop:
            return None


@contextmanager
def hooked(
    *pairs: tuple[nn.Module, Callable[..., Any]], after: tuple[tuple[nn.Module, Callable[..., Any]], ...] = ()
) -> Iterator[None]:
    """Within: (module, hook) before the calls of a module, called with its arguments; ``after``: with its output."""
    hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in pairs]
    hooks += [module.register_forward_hook(hook) for module, hook in after]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
