"""What a block returns, as data: enough to build a stand-in for its output on a stage that does not run the block.

A block's output is nested tuples, lists, dicts or model outputs. ``describe`` keeps the nesting and replaces every tensor
by a slot; ``rebuild`` is its inverse, given something to put into the slots. An output that *is* one of the call's
arguments (T5's blocks hand their position bias through) is described as that argument, so that a stand-in passes on what it
was given.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from oslo_engine.errors import PlanError

Path = tuple[int | str, ...]
SCALARS = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class TensorSlot:
    """A tensor that the block computed."""

    ndim: int
    dtype: str

    def to_json(self) -> Any:
        return {"tensor": [self.ndim, self.dtype]}


@dataclass(frozen=True)
class Argument:
    """The object found at ``path`` in the call's arguments: ("args", 0) or ("kwargs", "cache")."""

    path: Path

    def to_json(self) -> Any:
        return {"argument": list(self.path)}


@dataclass(frozen=True)
class Repeat:
    """The tensor that already stands at ``path`` of the same output."""

    path: Path

    def to_json(self) -> Any:
        return {"repeat": list(self.path)}


@dataclass(frozen=True)
class Constant:
    """None, a number or a string."""

    value: Any

    def to_json(self) -> Any:
        return {"constant": self.value}


@dataclass(frozen=True)
class Container:
    """A tuple, list, dict or output class. ``kind`` is "tuple", "list", "dict" or "module:Class"."""

    kind: str
    entries: tuple[tuple[int | str, Structure], ...]

    def to_json(self) -> Any:
        return {"container": self.kind, "entries": [[key, entry.to_json()] for key, entry in self.entries]}


Structure = TensorSlot | Argument | Repeat | Constant | Container


@dataclass(frozen=True)
class Written:
    """What a block put into a dict or list among its arguments: ``container[key]``, the container standing at ``path``."""

    path: Path
    key: int | str
    value: Structure

    def to_json(self) -> Any:
        return {"path": list(self.path), "key": self.key, "value": self.value.to_json()}


def entries_of(value: Any) -> list[tuple[int | str, Any]] | None:
    """The children of a container with their keys; None if ``value`` is not one."""
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every object that is not a container, with its path."""
    entries = entries_of(value)
    if entries is None:
        yield path, value
        return
    for key, child in entries:
        yield from walk(child, (*path, key))


def at(value: Any, path: Sequence[int | str]) -> Any:
    """Follow ``path`` into nested containers."""
    for key in path:
        value = getattr(value, str(key)) if dataclasses.is_dataclass(value) and not isinstance(value, Mapping) else value[key]
    return value


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments as the one container that ``Argument`` and ``Written`` paths lead into."""
    return {"args": tuple(args), "kwargs": dict(kwargs)}


def describe(output: Any, given: Mapping[int, Path]) -> Structure:
    """Describe what a call returned.

    Args:
        output: any nesting of containers, tensors, numbers and objects that were passed in.
        given: ``id`` of the objects that were passed in -> their path in the arguments.

    Raises:
        PlanError: the output holds an object that no stand-in could be built for.
    """
    seen: dict[int, Path] = {}

    def visit(value: Any, path: Path) -> Structure:
        if id(value) in given:
            return Argument(given[id(value)])
        if isinstance(value, Tensor):
            first = seen.setdefault(id(value), path)
            return TensorSlot(value.ndim, str(value.dtype).removeprefix("torch.")) if first == path else Repeat(first)
        if isinstance(value, SCALARS):
            return Constant(value)
        entries = entries_of(value)
        if entries is None:
            raise PlanError(
                "a block returns an object that is neither a tensor nor a container of tensors",
                where=f"output{_brackets(path)}",
                got=type(value).__name__,
                hint="choose blocks in the policy that exchange tensors, or use pp=1",
            )
        return Container(_kind(value), tuple((key, visit(child, (*path, key))) for key, child in entries))

    return visit(output, ())


def rebuild(structure: Structure, tensor_at: Callable[[Path, TensorSlot], Tensor], arguments: Mapping[str, Any]) -> Any:
    """Build an output of this structure. Inverse: ``describe``.

    Args:
        structure: what to build.
        tensor_at: gives the tensor for a slot, from its path in the output.
        arguments: of the call that is stood in for, see ``arguments_of``.
    """
    made: dict[Path, Tensor] = {}

    def visit(node: Structure, path: Path) -> Any:
        if isinstance(node, TensorSlot):
            made[path] = tensor_at(path, node)
            return made[path]
        if isinstance(node, Argument):
            return at(arguments, node.path)
        if isinstance(node, Repeat):
            return made[node.path]
        if isinstance(node, Constant):
            return node.value
        return _build(node.kind, [(key, visit(child, (*path, key))) for key, child in node.entries])

    return visit(structure, ())


def slots(structure: Structure, path: Path = ()) -> Iterator[tuple[Path, TensorSlot]]:
    """Every tensor slot with its path."""
    if isinstance(structure, TensorSlot):
        yield path, structure
    elif isinstance(structure, Container):
        for key, child in structure.entries:
            yield from slots(child, (*path, key))


def _kind(value: Any) -> str:
    cls = type(value)
    return cls.__name__ if cls in (tuple, list, dict) else f"{cls.__module__}:{cls.__qualname__}"


def _build(kind: str, entries: list[tuple[int | str, Any]]) -> Any:
    values = [value for _, value in entries]
    if kind in ("tuple", "list"):
        return tuple(values) if kind == "tuple" else values
    if kind == "dict":
        return dict(entries)
    module, _, name = kind.partition(":")
    cls: Any = importlib.import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    if hasattr(cls, "_fields"):
        return cls(*values)
    if issubclass(cls, tuple | list):
        return cls(values)
    takes_names = dataclasses.is_dataclass(cls)
    return cls(**{str(key): value for key, value in entries}) if takes_names else cls(dict(entries))


def _brackets(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)
