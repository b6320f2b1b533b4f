"""What is wrong with the words of a policy file: each fault with its line, and what could stand there instead."""

from __future__ import annotations

import copy
import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from oslo_engine.errors import PolicyError
from oslo_engine.policy.schema import Policy

HINT = "docs/policies.md lists what a policy may say"
_OWN = ("origin", "lines")  # of a Policy, but no words of a file
_UNKNOWN, _MISSING = "extra_forbidden", "missing"
_Location = tuple[str | int, ...]


def tell_faults(error: ValidationError, wheres: Mapping[str, str], origin: str) -> list[PolicyError]:
    """One error for each fault, in the order of the file's entries.

    Args:
        wheres: dotted path of an entry -> file:line.
        origin: the file, for what has no line.
    """
    return [_told(one, wheres, origin) for one in error.errors()]


def joined(faults: Sequence[PolicyError], title: str, hint: str | None = None) -> PolicyError:
    """One error that tells all of them: a single one as it is."""
    if len(faults) == 1:
        return faults[0]
    told = "\n".join(f"- {str(fault).replace(chr(10), chr(10) + '  ')}" for fault in faults)
    return PolicyError(f"{len(faults)} faults in {title}\n{told}", hint=hint)


def without_faults(content: Mapping[str, Any], error: ValidationError) -> dict[str, Any] | None:
    """The content with unknown keys read as the nearest known ones, and other faulty entries left out.

    Returns:
        None if what is missing cannot be left out.
    """
    better: dict[str, Any] = copy.deepcopy(dict(content))
    for one in error.errors():
        *above, key = _path_in(better, one["loc"])
        owner = _entry(better, above)
        if one["type"] == _MISSING or not isinstance(owner, dict) or key not in owner:
            return None
        value = owner.pop(key)
        if one["type"] == _UNKNOWN and (near := nearest(str(key), _keys_at(one["loc"]))) and near not in owner:
            owner[near] = value
    return better


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant; None if none is near."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)), None)


def _told(one: Any, wheres: Mapping[str, str], origin: str) -> PolicyError:
    location: _Location = one["loc"]
    where = f"{_line_of(location, wheres, origin)} ({'.'.join(map(str, location))})"
    if one["type"] == _UNKNOWN:
        known = _keys_at(location)
        near = nearest(str(location[-1]), known)
        return PolicyError(
            f"unknown key {str(location[-1])!r}",
            where=where,
            expected=", ".join(known),
            hint=f"did you mean {near!r}?" if near else HINT,
        )
    if one["type"] == _MISSING:
        return PolicyError(f"the key {str(location[-1])!r} is missing", where=where, hint=HINT)
    text = one["msg"].removeprefix("Value error, ")
    return PolicyError(f"the policy is not valid: {text}", where=where, got=_shorten(one.get("input")), hint=HINT)


def _keys_at(location: _Location) -> list[str]:
    """The keys that may stand beside the last word of a location."""
    kind: Any = Policy
    for word in location[:-1]:
        kind = _model_in(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(word)].annotation
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
    kind = _model_in(kind)
    fields = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
    return [name for name in fields if not (kind is Policy and name in _OWN)]


def _model_in(kind: Any) -> Any:
    """A type without what is written around it: ``Annotated[...]``, ``... | None``."""
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return kind


def _path_in(content: Any, location: _Location) -> list[str | int]:
    """A location as far as it names entries: pydantic also names positions in what was no list in the file."""
    path: list[str | int] = []
    for word in location:
        path.append(word)
        content = content.get(word) if isinstance(content, dict) else None
        if not isinstance(content, dict):
            break
    return path


def _entry(content: Any, path: Sequence[str | int]) -> Any:
    for word in path:
        content = content[word]
    return content


def _line_of(location: _Location, wheres: Mapping[str, str], origin: str) -> str:
    words = [str(word) for word in location]
    lines = (wheres.get(".".join(words[:depth])) for depth in range(len(words), -1, -1))
    return next((line for line in lines if line is not None), origin)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
