"""Modules whose calls a pipeline stage may answer in their place.

While no stage runs, a switchable module is what it was. While one runs, its calls are handed to ``switch.current``, which runs
it, answers for it, or ends the forward. A call is what comes from outside, by ``module(...)`` or, in some models, by
``module.forward(...)``: not the ``forward`` within a ``__call__``, nor that of activation checkpointing, which no stage runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from oslo_engine.layers.specialize import specialize


class CallHandler(Protocol):
    def __call__(
        self, name: str, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call of the module ``name``; ``run()`` is the module's own answer."""


class Switch:
    """One per model: who answers the calls of its switchable modules just now."""

    def __init__(self) -> None:
        self.current: CallHandler | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        memo[id(self)] = copied = Switch()
        return copied

    @contextmanager
    def handled_by(self, handler: CallHandler | None) -> Iterator[None]:
        before, self.current = self.current, handler
        try:
            yield
        finally:
            self.current = before


class _Switchable:
    hands_through = True  # see layers.specialize
    _oslo_switch: Switch
    _oslo_name: str
    _oslo_runs = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._oslo_answer(super().__call__, args, kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._oslo_answer(super().forward, args, kwargs)  # type: ignore[misc]

    def _oslo_answer(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = self._oslo_switch.current
        if handler is None or self._oslo_runs:
            return own(*args, **kwargs)

        def run() -> Any:
            self._oslo_runs = True
            try:
                return own(*args, **kwargs)
            finally:
                self._oslo_runs = False

        return handler(self._oslo_name, self, run, args, kwargs)  # type: ignore[arg-type]


class _Around:
    """A module around a switchable one, which answers for both: the call of the inner one is a part of its own."""

    _oslo_inner: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = self._oslo_inner
        before, inner._oslo_runs = inner._oslo_runs, True
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            inner._oslo_runs = before


def make_switchable(module: nn.Module, name: str, switch: Switch) -> nn.Module:
    return specialize(module, _Switchable, _oslo_switch=switch, _oslo_name=name)


def switch_around(module: nn.Module, inner: nn.Module) -> nn.Module:
    """Let a module that was put around another be switched in its place, if that one is switchable (in place)."""
    if not isinstance(inner, _Switchable):
        return module
    specialize(module, _Around, _oslo_inner=inner)
    return make_switchable(module, inner._oslo_name, inner._oslo_switch)
