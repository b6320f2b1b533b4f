"""Reading policy files, with the line of every entry kept for error messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from oslo_engine.errors import PolicyError
from oslo_engine.policy.schema import Policy

Lines = dict[str, str]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_EXTENDED = ("models", "name")


def load_policy(path: Path, find_base: Callable[[str], Path]) -> Policy:
    """Read one YAML file, laid over the policy it extends.

    Args:
        path: the file.
        find_base: gives the file of a policy named by ``extends``.

    Raises:
        PolicyError: not readable, not YAML, unknown keys, wrong values, circular ``extends``; ``where`` is file:line.
    """
    content, lines = _read_with_base(path, find_base, ())
    content.setdefault("name", path.stem)
    try:
        policy = Policy(**content)
    except ValidationError as error:
        raise _told(error, path, lines) from None
    return policy.model_copy(update={"origin": str(path), "lines": lines})


def _told(error: ValidationError, path: Path, lines: Lines) -> PolicyError:
    """Every fault of the file in one error, each with its line."""
    faults = []
    for one in error.errors():
        location = [str(part) for part in one["loc"] if part in _keys(lines)]
        faults.append(
            (
                one["msg"].removeprefix("Value error, "),
                f"{_line_of(lines, location, path)} ({'.'.join(map(str, one['loc']))})",
                _shorten(one.get("input")),
            )
        )
    hint = "docs/policies.md lists what a policy may say"
    if len(faults) == 1:
        what, where, got = faults[0]
        return PolicyError(f"the policy is not valid: {what}", where=where, got=got, hint=hint)
    told = "\n".join(f"- {where}: {what}, got {got}" for what, where, got in faults)
    return PolicyError(f"the policy is not valid, {len(faults)} faults:\n{told}", where=str(path), hint=hint)


def _keys(lines: Lines) -> set[str]:
    return {part for key in lines for part in key.split(".")}


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
        below, below_lines = _read_with_base(find_base(base), find_base, (*chain, path))
        for own in _NOT_EXTENDED:
            below.pop(own, None)
        whole, all_lines = _lay_over(whole, below), all_lines | below_lines
    return _lay_over(whole, content), all_lines | lines


def _read(path: Path) -> tuple[dict[str, Any], Lines]:
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except OSError as error:
        raise PolicyError("the policy file cannot be read", where=str(path), got=error.strerror or str(error)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise PolicyError(
            "the policy file is not YAML", where=f"{path}{line}", got=str(getattr(error, "problem", error))
        ) from None
    if not isinstance(node, yaml.MappingNode):
        raise PolicyError("the policy file must hold a mapping", where=f"{path}:1", got=type(node).__name__)
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
                raise PolicyError("a key stands twice", where=f"{path}:{key_node.start_mark.line + 1}", got=key)
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


def _line_of(lines: Lines, location: list[str], path: Path) -> str:
    for depth in range(len(location), -1, -1):
        if (line := lines.get(".".join(location[:depth]))) is not None:
            return line
    return str(path)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
