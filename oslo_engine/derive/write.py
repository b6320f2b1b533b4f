"""A derived policy as YAML, with what was seen as comments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from oslo_engine.policy.schema import Argument, Cut, Policy, Region, Unit

_WIDTH = 120
_LISTS = ("inputs", "sum", "once")  # always lists; other fields take a single text too
_DEFAULTS = Region(columns={"a": ("b",)}, rows={"a": ("b",)})


def policy_text(policy: Policy, evidence: Mapping[str, str], notes: Sequence[str]) -> str:
    """
    Args:
        evidence: region -> what was seen.
        notes: comments at the top.
    """
    lines = [f"# {note}" for note in notes]
    lines.append(f"models: [{', '.join(policy.models)}]")
    lines += _section("stacks", dict(policy.stacks))
    lines += _section("units", {name: _unit(unit) for name, unit in policy.units.items()})
    if policy.regions:
        lines.append("regions:")
    for name, region in policy.regions.items():
        told = evidence.get(name, "")
        lines.append(f"  {name}:" + (f" # {told}" if told else ""))
        for key, value in _content(region).items():
            lines += _entry(key, value, 4)
    vocabulary = {key: list(value) for key, value in policy.vocabulary.model_dump().items() if value}
    lines += _section("vocabulary", vocabulary)
    lines += _section("replicate", dict(policy.replicate))
    if policy.sequence_parallel:
        lines.append("sequence_parallel: true")
    return "\n".join(lines) + "\n"


def _section(title: str, entries: Mapping[str, Any]) -> list[str]:
    if not entries:
        return []
    return [f"{title}:", *(line for key, value in entries.items() for line in _entry(key, value, 2))]


def _entry(key: str, value: Any, indent: int) -> list[str]:
    line = f"{' ' * indent}{_flow(key)}: {_flow(value)}"
    if len(line) <= _WIDTH or not isinstance(value, dict):
        return [line]
    return [f"{' ' * indent}{_flow(key)}:", *(part for name, one in value.items() for part in _entry(name, one, indent + 2))]


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n...\n").removesuffix("\n") if isinstance(value, (dict, list)) else text.split("\n")[0]


def _content(region: Region) -> dict[str, Any]:
    """The fields that are not as by default, in the schema's order."""
    found: dict[str, Any] = {}
    for name in type(region).model_fields:
        value = getattr(region, name)
        if value != (() if name in ("columns", "rows") else getattr(_DEFAULTS, name)) and value != {}:
            found[name] = list(value) if name in _LISTS else _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Unit):
        return _unit(value)
    if isinstance(value, Cut):
        unit = _plain(value.unit)
        return unit if value.dim == 0 else {"unit": unit, "dim": value.dim}
    if isinstance(value, Argument):
        return {"unit": value.unit, "dim": value.dim, **({"repeated": True} if value.repeated else {})}
    if hasattr(value, "model_dump"):
        return {key: _plain(one) for key, one in value if one != type(value).model_fields[key].default}
    if isinstance(value, tuple):
        return _plain(value[0]) if len(value) == 1 and isinstance(value[0], str) else [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _unit(unit: Unit) -> Any:
    count: Any = int(unit.count) if unit.count.isdigit() else unit.count
    more = {**({"per": unit.per} if unit.per else {}), **({"blocks": _plain(unit.blocks)} if unit.blocks != "1" else {})}
    return {"count": count, **more} if more else count
