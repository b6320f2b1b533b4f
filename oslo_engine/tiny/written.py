"""Sizes of tiny models that names cannot tell, from the policies' file ``_small.yaml``.

A value is what the field becomes; a list is a pattern over the layers that repeats; a text that begins with ``=`` is worked
out from ``heads``, ``kv_heads``, ``head_size``, ``hidden``, ``layers`` and ``vocab``, so that these can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from typing import Any

import yaml

from oslo_engine.plan.expressions import evaluate

_FILE = "_small.yaml"


ANY = "*"  # for the fields of any model type


def written_sizes(model_type: str) -> dict[str, Any]:
    """``field`` or ``part.field`` -> value, list, or a function of the lookup of names that gives the value."""
    return {name: _value(value, f"{_FILE}: {model_type}.{name}") for name, value in _entries().get(model_type, {}).items()}


def written_model_types() -> tuple[str, ...]:
    return tuple(name for name in _entries() if name != ANY)


def _value(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_value(each, where) for each in value]
    if isinstance(value, str) and value.startswith("="):
        return partial(_evaluate, value[1:].strip(), where)
    return value


def _evaluate(expression: str, where: str, lookup: Callable[[str], int]) -> int:
    return evaluate(expression, lookup, where=where)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    text = (resources.files("oslo_engine.policies") / _FILE).read_text(encoding="utf-8")
    return yaml.safe_load(text) or {}
