"""The tensors that block calls give: what crosses the cuts of a pipeline."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from oslo_engine.rewrite.record import WrittenKey
from oslo_engine.rewrite.structure import Path


@dataclass(frozen=True, order=True)
class Value:
    """A tensor that a block call gave.

    Attributes:
        call: number of the call.
        path: leads to it in the call's output or, if ``written``, in its arguments after the call: ("kwargs", "kv", "full").
        written: it is one of the call's arguments: the block put it into a dict or list there, or was given it.
    """

    call: int
    path: Path
    written: bool = False

    @property
    def order(self) -> tuple[int, bool, tuple[str, ...]]:
        """Sorts values that cross a cut, the same way on every rank."""
        return self.call, self.written, tuple(f"{key:06d}" if isinstance(key, int) else key for key in self.path)

    def to_json(self) -> Any:
        return {"call": self.call, "path": list(self.path), "written": self.written}


def value_of(node: fx.Node) -> Value | None:
    """The block result that a node stands for; None if it is something else."""
    path: list[int | str] = []
    while node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        key: Any = node.args[1]
        if isinstance(key, WrittenKey):
            return Value(node.args[0].meta["call"], key.path, written=True)
        path.insert(0, key)
        node = node.args[0]
    return Value(node.meta["call"], tuple(path)) if node.op == "call_module" else None
