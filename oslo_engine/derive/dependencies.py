"""What each feature that enters a linear layer depends on: entries of parameters, buffers and tensor arguments of its block.

For every feature the gradient is taken with respect to everything in the block; the entries where it is not zero are those the
feature depends on. Weights and lengths differ from run to run, and what is seen in any run counts. Norms pass gradients feature
by feature, so that they do not hide what is separate but for their statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oslo_engine.derive.probe import Probe, Source, Tables
from oslo_engine.derive.specimen import Specimen


@dataclass
class Dependence:
    """What the features that enter one linear layer depend on.

    row: its name within the block. size: number of features.
    uses: source -> [features, entries], whether a feature depends on an entry; one for each size that an argument had.
    ndims: number of dimensions of each source.
    """

    row: str
    size: int
    uses: dict[Source, list[Tensor]] = field(default_factory=dict)
    ndims: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, source: Source, table: Tensor, ndim: int) -> None:
        self.ndims[source.kind, source.name] = ndim
        tables = self.uses.setdefault(source, [])
        for known in tables:
            if known.shape == table.shape:
                known |= table
                return
        tables.append(table.clone())

    def knows(self, source: Source, table: Tensor) -> bool:
        """Whether a table could add nothing to what a layout is read from.

        One of another size adds nothing where each entry is used by all features or by none: it is not cut in any case.
        """
        tables = self.uses.get(source, [])
        if not tables:
            return not bool(table.any())
        same = [known for known in tables if known.shape == table.shape]
        if same:
            return not bool((table & ~same[0]).any())
        return any(bool((known == known[:1]).all()) for known in tables)


class Dependences:
    """Of one block of a specimen; the runs are made once."""

    def __init__(self, specimen: Specimen, block: str) -> None:
        self.specimen, self.block = specimen, block
        self._probes: dict[tuple[int, frozenset[str]], Probe] = {}

    def find(self, *, ends: Collection[str] = (), skip: Collection[str] = ()) -> list[Dependence]:
        """Of the linear layers whose features do not all depend on the same.

        Args:
            ends: linear layers whose outputs count as independent of everything before (rows that were found already).
            skip: linear layers not to look at.
        """
        found: dict[str, Dependence] = {}
        dense: set[str] = set()
        for number in range(len(self.specimen.runs)):
            probe = self._probe(number, ends)
            for row in probe.rows:
                if row in skip or row in dense:
                    continue
                if row in found:
                    self._add(found[row], number, ends)
                elif _are_apart(probe, row, ends):
                    found[row] = Dependence(row, probe.inputs[row].shape[-1])
                    _add_all(found[row], probe, probe.closed(row, probe.each(row), ends))
                elif number == 0:
                    dense.add(row)
        return list(found.values())

    def _add(self, dependence: Dependence, number: int, ends: Collection[str]) -> None:
        """What a further run shows."""
        probe, row = self._probe(number, ends), dependence.row
        bound = _bound(self._probe(0, ends), probe, row)
        if bound is not None:
            tables = probe.closed(row, bound, ends)
            if all(dependence.knows(source, table) for source, table in tables.items()):
                return
        _add_all(dependence, probe, probe.closed(row, probe.each(row), ends))

    def _probe(self, number: int, ends: Collection[str]) -> Probe:
        """The run, with those of the ends cut off in its graph that it cannot leave out by itself."""
        plain = self._made(number, frozenset())
        return self._made(number, frozenset(ends) & plain.linears.keys() - plain.closable)

    def _made(self, number: int, ends: frozenset[str]) -> Probe:
        if (number, ends) not in self._probes:
            self.specimen.use(number)
            self._probes[number, ends] = Probe(self.specimen, self.block, number, ends)
            self.specimen.use(0)
        return self._probes[number, ends]


def _add_all(dependence: Dependence, probe: Probe, tables: Tables) -> None:
    for source, table in tables.items():
        dependence.add(source, table, probe.sources[source.kind, source.name].ndim)


def _are_apart(probe: Probe, row: str, ends: Collection[str]) -> bool:
    """Whether the first and the last feature use different entries of a matrix, in a row that nothing goes around."""
    tables = probe.outer(row, ends)
    if tables is None:
        return False
    for source, used in tables.items():
        if source.kind == "parameter" and probe.sources["parameter", source.name].ndim > 1:
            first, last = used
            if bool((first & ~last).any() and (last & ~first).any()):
                return not probe.goes_around(row)
    return False


def _bound(first: Probe, probe: Probe, row: str) -> Tables | None:
    """What a row's features may depend on in a run, at most: what they did in the first one, if that can be shown.

    A feature uses no more than its neighbours do together, and no more than all that have its place among their neighbours do.
    Where both leave nothing but what was seen in the first run, few gradients show what would take one for each feature.
    """
    seen = first.each(row)
    size = first.inputs[row].shape[-1]
    if row not in probe.inputs or probe.inputs[row].shape[-1] != size:
        return None
    width = _neighbours(seen, size)
    if width is None:
        return None
    groups = [list(range(start, start + width)) for start in range(0, size, width)]
    groups += [list(range(place, size, width)) for place in range(width)]
    pooled = probe.together(row, groups)
    return {source: _met(table, width) for source, table in pooled.items()} if _within(pooled, seen, width) else None


def _neighbours(seen: Tables, size: int) -> int | None:
    """How many neighbours to take together, so that what was seen can be told from its groups: with fewest groups."""
    widths = [width for width in range(2, size) if size % width == 0 and width + size // width < size]
    for width in sorted(widths, key=lambda width: width + size // width):
        if all(torch.equal(_met(_pooled(table, width), width), table) for table in seen.values()):
            return width
    return None


def _within(pooled: Mapping[Source, Tensor], seen: Mapping[Source, Tensor], width: int) -> bool:
    for source, table in pooled.items():
        known = seen.get(source)
        if known is None and bool(table.any()):
            return False
        if known is not None and known.shape[1] == table.shape[1] and bool((_met(table, width) & ~known).any()):
            return False
    return True


def _pooled(table: Tensor, width: int) -> Tensor:
    """Of each feature -> of neighbours together, then of those at one place among their neighbours; [groups, entries]."""
    items = table.unflatten(0, (-1, width))
    return torch.cat([items.any(1), items.any(0)])


def _met(pooled: Tensor, width: int) -> Tensor:
    """What each feature may use by both of its groups, [features, entries]."""
    neighbours, places = pooled[:-width], pooled[-width:]
    return (neighbours[:, None] & places[None]).flatten(0, 1)
