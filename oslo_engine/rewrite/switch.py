"""Modules whose calls a pipeline stage may answer in their place.

While no stage runs, a switchable module is what it was. While one runs, its calls are handed to ``switch.current``, which runs
it, answers for it, or ends the forward. ``__call__`` is replaced, not ``forward``: activation checkpointing enters ``forward``
again.
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
    _oslo_switch: Switch
    _oslo_name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler = self._oslo_switch.current
        run = lambda: super(_Switchable, self).__call__(*args, **kwargs)  # type: ignore[misc]  # noqa: E731
        return run() if handler is None else handler(self._oslo_name, self, run, args, kwargs)  # type: ignore[arg-type]


def make_switchable(module: nn.Module, name: str, switch: Switch) -> nn.Module:
    return specialize(module, _Switchable, _oslo_switch=switch, _oslo_name=name)
