"""What ``make coverage`` found: how each architecture fared at each layout, as data beside the policies."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

_FILE = "coverage.json"


@cache
def _results() -> dict[str, dict[str, dict[str, Any]]]:
    file = resources.files("oslo_engine.policies") / _FILE
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    results: dict[str, dict[str, dict[str, Any]]] = content.get("results", {})
    return results


@cache
def layouts() -> tuple[str, ...]:
    """The layouts that were tried, in their order."""
    return tuple(dict.fromkeys(layout for one in _results().values() for layout in one))


def status_of_architectures() -> dict[str, tuple[str, ...]]:
    """``task/model type`` -> "pass", "refused", "fail", or "" for what was not tried, at each of ``layouts()``."""
    return {name: tuple(one.get(layout, {}).get("status", "") for layout in layouts()) for name, one in _results().items()}
