"""What a call did beyond returning something: writes in place, and values put into dicts and lists among its arguments."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor

from oslo_engine.rewrite.structure import SCALARS, Path, Structure, Written, describe, entries_of, walk


class Effects:
    """Made before a call, asked after it.

    Args:
        arguments: of the call, see ``structure.arguments_of``.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        leaves = [(path, value) for path, value in walk(arguments) if not isinstance(value, SCALARS)]
        self._versions = [(value, value._version) for _, value in leaves if isinstance(value, Tensor)]
        self._containers = [(path, container, dict(entries_of(container) or ())) for path, container in mutable_in(arguments)]
        self._given: dict[int, Path] = {}
        for path, value in [*leaves, *((path, container) for path, container, _ in self._containers)]:
            self._given.setdefault(id(value), path)

    def changed_tensors(self) -> list[Tensor]:
        """Argument tensors written in place. Returned by the call, they count as results, not as arguments handed through."""
        return [tensor for tensor, version in self._versions if tensor._version != version]

    def structure(self, output: Any) -> Structure:
        """Structure of what the call returned; a changed tensor and a container that holds one are results."""
        changed = {id(tensor) for tensor in self.changed_tensors()}
        changed |= {id(container) for _, container, _ in self._containers if any(id(v) in changed for _, v in walk(container))}
        return describe(output, {key: path for key, path in self._given.items() if key not in changed})

    def written(self) -> tuple[Written, ...]:
        """New and replaced entries of the containers."""
        return tuple(
            Written(path, key, self.structure(value))
            for path, container, before in self._containers
            for key, value in entries_of(container) or ()
            if key not in before or before[key] is not value
        )


def mutable_in(arguments: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    """Every dict and list that a call was given, with its path."""
    found: list[tuple[Path, Any]] = []

    def visit(value: Any, path: Path) -> None:
        if isinstance(value, MutableMapping | list):
            found.append((path, value))
        for key, child in entries_of(value) or ():
            visit(child, (*path, key))

    for side, values in arguments.items():
        for key, value in entries_of(values) or ():
            visit(value, (side, key))
    return found
