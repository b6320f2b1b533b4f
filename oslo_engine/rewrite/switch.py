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


def make_switchable(module: nn.Module, name: str, switch: Switch) -> nn.Module:
    return specialize(module, _Switchable, _oslo_switch=switch, _oslo_name=name)
