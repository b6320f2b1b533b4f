"""From what features depend on to what can be dealt out: the units, and how they lie in each tensor.

features that share entries of a matrix belong together     q_proj  0 0 1 1 2 2     (entries -> head that uses them)
those are the units; entries that several units use          k_proj  0 0 0 0 1 1     (entries -> group of heads)
belong to groups of units
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from oslo_engine.derive.dependencies import Dependence
from oslo_engine.derive.probe import Source

UNIT, GROUP, ALL = "unit", "group", "all"
Label = tuple[str, int] | None


@dataclass(frozen=True)
class Part:
    """Entries of a tensor, dealt by one level: ``width`` of them an item."""

    level: str
    width: int


@dataclass(frozen=True)
class Levels:
    """What is dealt: ``count`` units of ``width`` features; ``groups`` of them share entries, 0 where none do.

    blocks: the units come in this many blocks.
    """

    count: int
    width: int
    groups: int = 0
    blocks: int = 1


@dataclass(frozen=True)
class CutTensor:
    """A parameter, buffer or argument and its parts along ``dim``. repeated: the items come again and again."""

    kind: str
    name: str
    dim: int
    ndim: int
    parts: tuple[Part, ...]
    repeated: bool = False


@dataclass(frozen=True)
class Layout:
    """levels, the parts of the row's own features, all that is cut, and the names of parameters that all units use."""

    levels: Levels
    row: tuple[Part, ...]
    cuts: tuple[CutTensor, ...]
    shared: tuple[str, ...]


def find_layout(dependence: Dependence) -> Layout | str:
    """The layout in our words, or why there is none. Of several the one that leaves least whole."""
    partitions = _partitions(dependence)
    if not any(len(classes) > 1 for classes in partitions):
        return "all features depend on the same entries"
    found: list[tuple[float, Layout]] = []
    for units, groups in _candidates(partitions):
        for blocks in [1] if groups else _divisors(len(units)):
            layout = _Reading(dependence, units, groups, blocks).layout()
            if layout is not None:
                found.append((_entries_held(dependence, layout), layout))
                break
    return min(found, key=lambda one: one[0])[1] if found else "the units do not lie in an order that can be said"


def _entries_held(dependence: Dependence, layout: Layout) -> float:
    """Entries of matrices that each of two ranks would hold, in whole rows and columns."""
    cut = {(one.name, one.dim) for one in layout.cuts if one.kind == "parameter"}
    held = 0.0
    for (kind, name), ndim in dependence.ndims.items():
        if kind == "parameter" and ndim > 1:
            sizes = {source.dim: tables[0].shape[1] for source, tables in dependence.uses.items() if source.name == name}
            size = math.prod(sizes.values())
            held += size / 2 if any((name, dim) in cut for dim in sizes) else size
    return held


def _partitions(dependence: Dependence) -> list[list[list[int]]]:
    """Ever coarser divisions of the features: features that use one entry are together, short-ranged entries first."""
    size = dependence.size
    sets = {
        tuple(column.nonzero().flatten().tolist())
        for source, tables in dependence.uses.items()
        if source.kind == "parameter" and dependence.ndims[source.kind, source.name] > 1
        for table in tables
        for column in table.T
    }
    sets = {one for one in sets if one and len(one) < size}
    parents = list(range(size))

    def find(at: int) -> int:
        while parents[at] != at:
            parents[at] = parents[parents[at]]
            at = parents[at]
        return at

    def classes() -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for feature in range(size):
            found.setdefault(find(feature), []).append(feature)
        return list(found.values())

    found = [classes()] if sets else []
    for _, alike in groupby(sorted(sets, key=_span), key=_span):
        for one in alike:
            for feature in one[1:]:
                parents[find(feature)] = find(one[0])
        if len(now := classes()) != len(found[-1]):
            found.append(now)
    return found


def _span(features: Sequence[int]) -> int:
    return features[-1] - features[0]


def _candidates(partitions: list[list[list[int]]]) -> Iterable[tuple[list[list[int]], list[list[int]]]]:
    """(units, groups of them) to try, the finest that are worth it first."""
    if not partitions:
        return
    last = partitions[-1]
    for finer in reversed(partitions[:-1]):
        if _are_runs(finer) and len(finer[0]) > 1 and len(finer) % len(last) == 0 and len(finer) > len(last):
            yield finer, last
            break
    for classes in reversed(partitions):
        if len(classes) > 1:
            yield classes, []


def _are_runs(classes: list[list[int]]) -> bool:
    size = len(classes[0])
    return all(len(one) == size and _span(one) == size - 1 for one in classes)


def _divisors(number: int) -> list[int]:
    return [blocks for blocks in range(1, number) if number % blocks == 0]


class _Reading:
    """Reads the tables of one dependence in terms of given units and groups."""

    def __init__(self, dependence: Dependence, units: list[list[int]], groups: list[list[int]], blocks: int) -> None:
        self.dependence, self.units, self.groups, self.blocks = dependence, units, groups, blocks
        self.unit_of = {feature: at for at, unit in enumerate(units) for feature in unit}
        group_of = {feature: at for at, group in enumerate(groups) for feature in group}
        self.members: dict[frozenset[int], int] = {}
        for at in range(len(groups)):
            self.members[frozenset(self.unit_of[feature] for feature in groups[at])] = at
        self.group_of = {self.unit_of[feature]: at for feature, at in group_of.items()}
        self._in_unit = torch.zeros(len(units), dependence.size, dtype=torch.bool)
        for feature, unit in self.unit_of.items():
            self._in_unit[unit, feature] = True

    def layout(self) -> Layout | None:
        row = self._parts([(UNIT, self.unit_of[feature]) for feature in range(self.dependence.size)])
        if row is None:
            return None
        cuts, shared, uses_groups = [], [], len(self.groups) > 1
        for source, tables in self.dependence.uses.items():
            ndim = self.dependence.ndims[source.kind, source.name]
            cut = self._cut(source, tables, ndim)
            if cut is not None:
                cuts.append(cut)
                uses_groups |= source.kind != "argument" and any(part.level == ALL for part in cut.parts)
        cut_names = {(cut.kind, cut.name) for cut in cuts}
        if not any(cut.kind == "parameter" and cut.ndim > 1 for cut in cuts):
            return None
        shared = [
            source.name
            for source in self.dependence.uses
            if source.kind == "parameter" and (source.kind, source.name) not in cut_names
        ]
        groups = (len(self.groups) or 1) if uses_groups else 0
        width = sum(part.width for part in row)
        levels = Levels(len(self.units), width, groups, self.blocks)
        return Layout(levels, row, tuple(_one_dim_each(cuts)), tuple(dict.fromkeys(shared)))

    def _cut(self, source: Source, tables: list[Tensor], ndim: int) -> CutTensor | None:
        read = {self._words(table) for table in tables}
        if len(read) != 1 or (parts := read.pop()) is None:
            return None
        named, again = parts
        repeated = again and source.kind == "argument"
        return CutTensor(source.kind, source.name, source.dim, ndim, named[:1] if repeated else named, repeated)

    def _words(self, table: Tensor) -> tuple[tuple[Part, ...], bool] | None:
        labels = self._labels(table)
        if labels.count(("?", 0)) or not any(label is not None and label[0] != ALL for label in labels):
            return None
        parts = self._parts(labels)
        if parts is None:
            return None
        if len(parts) > 1 and len(set(parts)) == 1 and parts[0].level == UNIT:
            return parts, True
        return parts, False

    def _labels(self, table: Tensor) -> list[Label]:
        """For each entry the units whose features depend on it."""
        used = (self._in_unit.to(torch.float32) @ table.to(torch.float32)) > 0  # [units, entries]
        counts, first = used.sum(0).tolist(), used.to(torch.int8).argmax(0).tolist()
        labels: list[Label] = []
        for entry, count in enumerate(counts):
            if count == 0:
                labels.append(None)
            elif count == 1:
                labels.append((UNIT, first[entry]))
            elif count == len(self.units):
                labels.append((ALL, 0))
            else:
                group = self.members.get(frozenset(used[:, entry].nonzero().flatten().tolist()))
                labels.append(("?", 0) if group is None else (GROUP, group))
        return labels

    def _parts(self, labels: list[Label]) -> tuple[Part, ...] | None:
        """Parts that lie one after another, in each block alike. Entries without a label fit anywhere."""
        if len(labels) % self.blocks or all(label is None for label in labels):
            return None
        length = len(labels) // self.blocks
        read = {self._read(labels[block * length : (block + 1) * length], block, 0) for block in range(self.blocks)}
        return read.pop() if len(read) == 1 else None

    def _read(self, labels: list[Label], block: int, start: int) -> tuple[Part, ...] | None:
        if start == len(labels):
            return ()
        for part in self._parts_at(labels, block, start):
            rest = self._read(labels, block, start + part.width * self._count(part.level))
            if rest is not None:
                return (part, *rest)
        return None

    def _parts_at(self, labels: list[Label], block: int, start: int) -> Iterator[Part]:
        """Parts that may begin at an entry."""
        seen = next((label for label in labels[start:] if label is not None), None)
        level = UNIT if seen is None else seen[0]
        count = self._count(level)
        for width in range(1, (len(labels) - start) // count + 1):
            items = (labels[start + item * width : start + (item + 1) * width] for item in range(count))
            if all(set(given) <= {None, (level, block * count + item)} for item, given in enumerate(items)):
                after = start + count * width
                if level != ALL or after == len(labels) or labels[after] not in (None, (ALL, 0)):
                    yield Part(level, width)

    def _count(self, level: str) -> int:
        return {UNIT: len(self.units), GROUP: max(len(self.groups), 1), ALL: self.blocks}[level] // self.blocks


def _one_dim_each(cuts: Iterable[CutTensor]) -> list[CutTensor]:
    """Of a tensor that could be cut in several dimensions the first."""
    found: dict[tuple[str, str], CutTensor] = {}
    for cut in cuts:
        found.setdefault((cut.kind, cut.name), cut)
    return list(found.values())
