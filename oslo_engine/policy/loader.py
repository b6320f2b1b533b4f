"""Reading policy files, with the line of every entry kept for error messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from oslo_engine.errors import PolicyError
from oslo_engine.policy.schema import Policy
from oslo_engine.policy.schema_faults import HINT, joined, tell_faults, without_faults

Lines = dict[str, str]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_EXTENDED = ("models", "name")


@dataclass(frozen=True)
class Reading:
    """What a file says. policy: without what is wrong in it; None if it says nothing without that. faults: what is wrong."""

    policy: Policy | None
    faults: tuple[PolicyError, ...] = ()


def load_policy(path: Path, find_base: Callable[[str], Path]) -> Policy:
    """Read one YAML file, laid over the policy it extends.

    Args:
        path: the file.
        find_base: gives the file of a policy named by ``extends``.

    Raises:
        PolicyError: not readable, not YAML, unknown keys, wrong values, circular ``extends``; ``where`` is file:line.
    """
    reading = read_policy(path, find_base)
    if reading.faults:
        raise joined(reading.faults, str(path), HINT)
    assert reading.policy is not None
    return reading.policy


def read_policy(path: Path, find_base: Callable[[str], Path]) -> Reading:
    """The same for a file that may say wrong things: they are collected, so that the rest can be looked at too.

    Raises:
        PolicyError: not readable, not YAML, circular ``extends``.
    """
    content, lines = _read_with_base(path, find_base, ())
    content.setdefault("name", path.stem)
    origin = {"origin": str(path), "lines": lines}
    try:
        return Reading(Policy(**content).model_copy(update=origin))
    except ValidationError as error:
        faults = tuple(tell_faults(error, lines, str(path)))
        better = without_faults(content, error)
    try:
        return Reading(None if better is None else Policy(**better).model_copy(update=origin), faults)
    except ValidationError:  # what is left contradicts itself
        return Reading(None, faults)


def _read_with_base(path: Path, find_base: Callable[[str], Path], chain: tuple[Path, ...]) -> tuple[dict[str, Any], Lines]:
    """The file laid over what it extends: one policy, or several in order."""
    if path in chain:
        names = " -> ".join(p.stem for p in (*chain, path))
        raise PolicyError("policies extend each other in a circle", where=str(path), got=names)
    content, lines = _read(path)
    bases = content.pop("extends", [])
    whole: dict[str, Any] = {}
    all_lines: Lines = {}
    for base in [bases] if isinstance(bases, str) else bases:
        below, below_lines = _read_with_base(_base_of(base, find_base, lines["extends"]), find_base, (*chain, path))
        for own in _NOT_EXTENDED:
            below.pop(own, None)
        whole, all_lines = _lay_over(whole, below), all_lines | below_lines
    return _lay_over(whole, content), all_lines | lines


def _base_of(name: str, find_base: Callable[[str], Path], where: str) -> Path:
    try:
        return find_base(name)
    except PolicyError as error:
        raise PolicyError(
            f"extends {name!r}: {error.what}", where=where, expected=error.expected, got=name, hint=error.hint
        ) from None


def _read(path: Path) -> tuple[dict[str, Any], Lines]:
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except OSError as error:
        raise PolicyError("the policy file cannot be read", where=str(path), got=error.strerror or str(error)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise PolicyError(
            "the policy file is not YAML",
            where=f"{path}{line}",
            got=str(getattr(error, "problem", error)),
            hint="look at that line and the one above it: indentation, brackets, a colon without a space behind it, quotes",
        ) from None
    if not isinstance(node, yaml.MappingNode):
        raise PolicyError(
            "the policy file must hold keys with values",
            where=f"{path}:1",
            got="nothing" if node is None else type(node).__name__.removesuffix("Node").lower(),
            hint=HINT,
        )
    lines: Lines = {"": f"{path}:1"}
    content = _convert(node, path, (), lines)
    return content, lines


def _convert(node: yaml.Node, path: Path, at: tuple[str, ...], lines: Lines) -> Any:
    lines[".".join(at)] = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in found:
                raise PolicyError(
                    "a key stands twice",
                    where=f"{path}:{key_node.start_mark.line + 1}",
                    got=key,
                    hint="the second would replace the first: join them, or take one away",
                )
            found[key] = _convert(value_node, path, (*at, key), lines)
            lines[".".join((*at, key))] = f"{path}:{key_node.start_mark.line + 1}"
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_convert(item, path, (*at, str(index)), lines) for index, item in enumerate(node.value)]
    return yaml.SafeLoader("").construct_object(node)


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Mappings are merged key by key; anything else replaces; ``null`` takes an entry away."""
    merged = dict(below)
    for key, value in above.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            own = merged.get(key)
            merged[key] = _lay_over(own if isinstance(own, dict) else {}, value)
        else:
            merged[key] = value
    return merged
