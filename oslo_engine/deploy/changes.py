"""What calls have changed in a model, so that workers that are started later have it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Change:
    """A call of a method that changed the model."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_changed(load: Callable[[], Any], changes: Sequence[Change]) -> Any:
    """A model with these changes, in their order. ``load`` loads it as it was at first."""
    model = load()
    for change in changes:
        getattr(model, change.method)(*change.args, **change.kwargs)
    return model
