"""The regions of a block: candidates from what features depend on, each kept only if a rank's part of it is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oslo_engine.derive.attributes import Case, Search
from oslo_engine.derive.calls import named_arguments, observed, repeat, tensors_of
from oslo_engine.derive.dependencies import Dependence, Dependences
from oslo_engine.derive.entry import Entry, find_entry
from oslo_engine.derive.experts import ExpertSearch, find_weights
from oslo_engine.derive.found import Findings, Found, is_entered, is_right
from oslo_engine.derive.norms import find_norms
from oslo_engine.derive.probe import is_linear
from oslo_engine.derive.specimen import Kind, Specimen
from oslo_engine.derive.trial import Local, Truth, match_one, why_not
from oslo_engine.derive.units import CutTensor, Layout, find_layout
from oslo_engine.derive.wording import Wording, is_column
from oslo_engine.errors import OsloError
from oslo_engine.policy.schema import Region, Unit

_PASSES = 3
_TP = (2, 3, 4)


@dataclass(frozen=True)
class _Candidate:
    layout: Layout
    columns: tuple[str, ...]
    row: str
    inner: tuple[str, ...] = ()

    @property
    def cut_names(self) -> set[str]:
        return {cut.name for cut in self.layout.cuts if cut.kind == "parameter"}


class BlockSearch:
    """Looks into one kind of block.

    Args:
        specimens: of the sizes that are looked into, by eager attention; then the same by another attention, and other sizes.
    """

    def __init__(self, specimens: Sequence[tuple[Specimen, bool]], kind: Kind, findings: Findings) -> None:
        self.specimen, self.kind, self.findings = specimens[0][0], kind, findings
        self.block = self.specimen.block(kind.block)
        self.modules = dict(self.block.named_modules())
        truths = [
            (Truth(specimen, kind.block), first_size) for specimen, first_size in specimens if kind.block in specimen.runs[0]
        ]
        self.cases = [Case(truth, tp, first) for truth, first in truths for tp in (_TP if first else _TP[:2])]
        self.truth = truths[0][0]
        self._dependences = {id(truth.specimen): Dependences(truth.specimen, kind.block) for truth, _ in truths}
        with observed(self.modules) as calls:
            repeat(self.block, self.specimen.runs[0][kind.block])
        self.calls = calls
        findings.ran |= {f"{kind.block}.{name}" for name in calls}
        self.norms = find_norms(self.modules, calls)
        self.done: set[str] = set()

    def run(self) -> None:
        """Add what is found to the findings, in the order in which it runs."""
        self._take_known()
        known = len(self.findings.regions)
        self._find_experts()
        self._find_rows()
        order = list(self.calls)
        places = {id(found): order.index(found.place) for found in self.findings.regions[known:]}
        self.findings.regions[known:] = sorted(self.findings.regions[known:], key=lambda found: places[id(found)])

    def _find_rows(self) -> None:
        ends: set[str] = set(self.done)
        waiting: dict[str, _Candidate] = {}
        tried: set[tuple[str, Layout]] = set()
        for _ in range(_PASSES):
            fresh: set[str] = set()
            for candidate in reversed(self._candidates(ends)):
                whole = self._joined(candidate, list(waiting.values()))
                if (whole.row, whole.layout) in tried or candidate.row in self.done:
                    continue
                tried.add((whole.row, whole.layout))
                why = self._accept(whole, ends)
                if why is not None:
                    self.findings.refused[f"{self.kind.block}.{candidate.row}"] = why
                    waiting[candidate.row] = candidate
                fresh.add(candidate.row)
            if fresh <= ends:
                break
            ends |= fresh

    def _take_known(self) -> None:
        """Regions found in other kinds of blocks, where they are right here too."""
        for at, known in enumerate(self.findings.regions):
            try:
                plans, _ = match_one(self.truth, known.region, known.units, 2)
            except OsloError:
                continue
            right = bool(plans) and all(is_right(known, case.truth, case.tp) for case in self.cases)
            if right and is_entered(known, self.truth):
                self.findings.regions[at] = replace(known, kinds=(*known.kinds, self.kind))
                prefix = len(self.kind.block) + 1
                for plan in plans:
                    self.done |= {name[prefix:] for name in (*plan.rows, *plan.inner, *plan.columns)}
                    self.done |= {plan.scope[prefix:]} if known.region.leave == "scope" else set()

    def _find_experts(self) -> None:
        truths = list({id(case.truth): (case.truth, case.first_size) for case in self.cases}.values())
        for weights in find_weights(self.block, self.calls):
            if weights.scope in self.done:
                continue
            found = ExpertSearch(truths, weights).run()
            if isinstance(found, str):
                self.findings.refused |= {f"{self.kind.block}.{weights.scope}.{name}": found for name in weights.parameters}
                continue
            told = f"{weights.count} experts in {', '.join(weights.parameters)}: the ranks' outputs add up"
            self.findings.regions.append(Found(found[0], found[1], (), (self.kind,), weights.scope, told))

    def _candidates(self, ends: set[str]) -> list[_Candidate]:
        skip = {name for name in self.done if name in self.modules} | self._repeated()
        found = []
        for dependence in self._dependences[id(self.specimen)].find(ends=ends, skip=skip):
            layout = find_layout(dependence)
            if isinstance(layout, str):
                self.findings.refused[f"{self.kind.block}.{dependence.row}"] = layout
                continue
            layout = self._with_biases(layout, dependence)
            columns = tuple(
                cut.name.rpartition(".")[0] for cut in layout.cuts if cut.kind == "parameter" and is_column(self.modules, cut)
            )
            if columns and not set(columns) & self.done:
                found.append(_Candidate(layout, columns, dependence.row))
        order = list(self.calls)
        return sorted(found, key=lambda candidate: order.index(candidate.row))

    def _repeated(self) -> set[str]:
        """Linear layers in lists of modules, but for the first one of each: the others are alike."""
        seen: dict[tuple[str, tuple[int, ...]], str] = {}
        for name in self.calls:
            module = self.modules[name]
            if is_linear(module):
                pattern = ".".join("*" if word.isdigit() else word for word in name.split("."))
                seen.setdefault((pattern, tuple(module.weight.shape)), name)
        return {name for name, module in self.modules.items() if is_linear(module)} - set(seen.values())

    def _with_biases(self, layout: Layout, dependence: Dependence) -> Layout:
        """Biases follow their weights, whatever was seen of them; the engine cuts those of columns by itself."""
        owners = {
            cut.name.rpartition(".")[0] for cut in layout.cuts if cut.kind == "parameter" and is_column(self.modules, cut)
        }
        cuts = tuple(
            cut
            for cut in layout.cuts
            if cut.kind != "parameter" or cut.name.rpartition(".")[0] not in owners or cut.name.endswith(".weight")
        )
        return replace(layout, cuts=cuts)

    def _joined(self, candidate: _Candidate, waiting: Sequence[_Candidate]) -> _Candidate:
        """With the rows before it that read the same columns: their whole outputs are what it goes on with."""
        inner = [
            one
            for one in waiting
            if one.row != candidate.row and one.cut_names & candidate.cut_names and one.layout.levels == candidate.layout.levels
        ]
        if not inner:
            return candidate
        cuts: dict[tuple[str, str, int], CutTensor] = {}
        for one in [candidate, *inner]:
            for cut in one.layout.cuts:
                known = cuts.get((cut.kind, cut.name, cut.dim))
                if known is None or len(cut.parts) > len(known.parts):
                    cuts[cut.kind, cut.name, cut.dim] = cut
        rows = tuple(one.row for one in inner)
        kept = tuple(cut for cut in cuts.values() if cut.name.rpartition(".")[0] not in rows)
        columns = tuple(dict.fromkeys(name for one in [candidate, *inner] for name in one.columns))
        return _Candidate(replace(candidate.layout, cuts=kept), columns, candidate.row, rows)

    def _elsewhere(self, candidate: _Candidate, ends: set[str]) -> list[tuple[Specimen, Layout]]:
        """The layout of the same rows in models of other sizes."""
        rows = {candidate.row, *candidate.inner}
        skip = {name for name, module in self.modules.items() if is_linear(module)} - rows
        found = []
        for specimen in {id(case.truth): case.truth.specimen for case in self.cases if not case.first_size}.values():
            layouts = {}
            for dependence in self._dependences[id(specimen)].find(ends=ends | set(candidate.inner), skip=skip):
                if not isinstance(layout := find_layout(dependence), str):
                    layouts[dependence.row] = self._with_biases(layout, dependence)
            if candidate.row in layouts:
                there = _Candidate(layouts.pop(candidate.row), candidate.columns, candidate.row)
                inner = [_Candidate(layout, candidate.columns, row) for row, layout in layouts.items()]
                found.append((specimen, self._joined(there, inner).layout))
        return found

    def _accept(self, candidate: _Candidate, ends: set[str]) -> str | None:
        """Keep a candidate as a region, or say why not."""
        if set(candidate.columns) & self.done:
            return "its columns belong to another region"
        entry = self._entry(candidate)
        if isinstance(entry, str):
            return entry
        handed_on = self._handed_on(entry)

        def worded(specimen: Specimen, layout: Layout) -> Wording:
            blocks = [block for block in self.kind.blocks if block in specimen.runs[0]]
            return Wording(specimen.model, blocks, layout, entry, candidate.row, candidate.inner, list(self.norms), handed_on)

        wording = worded(self.specimen, candidate.layout)
        others = {id(specimen): worded(specimen, layout) for specimen, layout in self._elsewhere(candidate, ends)}
        others = {key: other for key, other in others.items() if wording.is_like(other)}
        cases = [case for case in self.cases if case.first_size or id(case.truth.specimen) in others]
        search = Search(wording, list(others.values()), cases)
        choice = search.run()
        if isinstance(choice, str):
            return choice
        region, units, local = search.wording.region(choice)
        region = self._anywhere(region, units, local)
        self.findings.regions.append(Found(region, units, tuple(local), (self.kind,), candidate.row, _told(candidate)))
        self.done |= {candidate.row, *candidate.inner, *candidate.columns}
        return None

    def _anywhere(self, region: Region, units: dict[str, Unit], local: Sequence[Local]) -> Region:
        """The same for every place of a list that it fits, if it fits all that have its modules."""
        words = region.at.split(".")
        if not any(word.isdigit() for word in words):
            return region
        wider = region.model_copy(update={"at": ".".join("*" if word.isdigit() else word for word in words)})
        right = all(why_not(case.truth, wider, units, case.tp, local) is None for case in self.cases)
        return wider if right else region

    def _entry(self, candidate: _Candidate) -> Entry | str:
        owners = sorted({cut.name.rpartition(".")[0] for cut in candidate.layout.cuts if cut.kind != "argument"})
        cut_arguments = {cut.name for cut in candidate.layout.cuts if cut.kind == "argument"}
        block_arguments = {name for name in cut_arguments if name.startswith(":")}
        handed = self.specimen.runs[0][self.kind.block].handed_on
        needs_scope = any(name[1:] not in handed for name in block_arguments)
        return find_entry(
            self.specimen, self.kind.block, candidate.columns, owners, candidate.row, list(cut_arguments), needs_scope
        )

    def _handed_on(self, entry: Entry) -> list[str]:
        """Arguments of the scope that are arguments of the block which another block had returned."""
        call = self.specimen.runs[0][self.kind.block]
        if entry.scope is None or entry.scope not in self.calls:
            return []
        given = named_arguments(self.block, call.args, call.kwargs)
        handed = [tensor for name in call.handed_on for tensor in tensors_of(given.get(name))]
        inside = self.calls[entry.scope]
        scope = named_arguments(self.modules[entry.scope], inside.args, inside.kwargs)
        return [
            name
            for name, value in scope.items()
            if any(tensor.shape == one.shape and bool((tensor == one).all()) for tensor in tensors_of(value) for one in handed)
        ]


def _told(candidate: _Candidate) -> str:
    levels = candidate.layout.levels
    what = f"{levels.count} units of {levels.width} feature{'s' if levels.width > 1 else ''}"
    shared = f", {levels.groups} groups of them share entries" if levels.groups else ""
    blocks = f", in {levels.blocks} blocks" if levels.blocks > 1 else ""
    return f"{what} enter {candidate.row}{shared}{blocks}"
