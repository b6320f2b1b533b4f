"""Run one block per signature: a model of 126 equal blocks is recorded at the price of one.

Two block calls have the same signature when the modules are built alike and the arguments have the same shapes, types and
plain values. The second one is answered with zeros of the first one's structure. A call that could have effects beyond its
output (an object such as a cache, a dict or a list among its arguments) has no signature and is always run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.rewrite.effects import mutable_in
from oslo_engine.rewrite.structure import SCALARS, Path, Structure, TensorSlot, at, rebuild, slots, walk

PLAIN = (*SCALARS, torch.dtype, torch.device)


@dataclass(frozen=True)
class Answer:
    """What a block call gave, without its values."""

    output: Structure
    shapes: dict[Path, torch.Size]
    outside_reads: tuple[str, ...]


@dataclass
class Replay:
    """The answers of one recording, by signature.

    Args:
        blocks: name -> module of all blocks, in order.
    """

    blocks: Mapping[str, nn.Module]
    answers: dict[Hashable, Answer] = field(default_factory=dict)
    _builds: dict[str, Hashable] = field(default_factory=dict)

    def signature(self, name: str, arguments: Mapping[str, Any]) -> Hashable | None:
        """What decides a call's data flow; None if it must be run."""
        leaves = list(walk(arguments))
        if mutable_in(arguments) or not all(isinstance(leaf, (Tensor, *PLAIN)) for _, leaf in leaves):
            return None
        first: dict[int, int] = {}  # which arguments are one object
        described: list[Hashable] = []
        for position, (path, leaf) in enumerate(leaves):
            if isinstance(leaf, Tensor):
                described.append((path, tuple(leaf.shape), leaf.dtype, first.setdefault(id(leaf), position)))
            else:
                described.append((path, type(leaf), leaf))
        if name not in self._builds:
            self._builds[name] = self._build(name)
        return (self._builds[name], tuple(described))

    def remember(self, signature: Hashable, output: Any, structure: Structure, outside_reads: tuple[str, ...]) -> None:
        """Answer later calls of this signature by this one's structure."""
        shapes = {path: at(output, path).shape for path, _ in slots(structure)}
        self.answers[signature] = Answer(structure, shapes, outside_reads)

    def answer(self, signature: Hashable, arguments: Mapping[str, Any]) -> tuple[Any, Structure, tuple[str, ...]]:
        """Returns zeros of the remembered structure, the structure, and the tensors read outside the block."""
        known = self.answers[signature]

        def zeros(path: Path, slot: TensorSlot) -> Tensor:
            return torch.zeros(known.shapes[path], dtype=getattr(torch, slot.dtype))

        return rebuild(known.output, zeros, arguments), known.output, known.outside_reads

    def _build(self, name: str) -> Hashable:
        """How a block is made: classes, parameter shapes and plain attributes, where its own position counts as equal.

        The first and the last block of a stack are never answered by another: code that asks where it is asks for these.
        """
        stack, _, position = name.rpartition(".")
        ends = [block for block in self.blocks if block.rpartition(".")[0] == stack]
        module = self.blocks[name]
        own = int(position) if position.isdecimal() and name not in (ends[0], ends[-1]) else None
        parts = tuple((path, type(part), _plain(part, own)) for path, part in module.named_modules())
        shapes = tuple((path, tuple(parameter.shape)) for path, parameter in module.named_parameters())
        return (parts, shapes, name if own is None else "")


def _plain(module: nn.Module, own: int | None) -> Hashable:
    plain = [(key, value) for key, value in vars(module).items() if isinstance(value, PLAIN)]
    return tuple((key, "position" if type(value) is int and value == own else value) for key, value in plain)
