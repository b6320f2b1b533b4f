"""A layout in the words of a policy: units, columns, rows, and what else is cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from oslo_engine.derive.entry import Entry, common_module
from oslo_engine.derive.numbers import is_number, names_of
from oslo_engine.derive.probe import is_linear, out_dim
from oslo_engine.derive.trial import Local
from oslo_engine.derive.units import ALL, GROUP, UNIT, CutTensor, Layout, Part
from oslo_engine.errors import PolicyError
from oslo_engine.plan.expressions import evaluate
from oslo_engine.plan.units import FEATURE, look_up
from oslo_engine.policy.schema import Region, Unit


@dataclass(frozen=True)
class Choice:
    """What may be said in several ways: unit -> its count, part -> the name of its width, attribute -> its values."""

    counts: Mapping[str, str]
    widths: Mapping[Part, str] = field(default_factory=dict)
    set: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    named: bool = True

    def with_set(self, values: Mapping[str, tuple[str, ...]]) -> Choice:
        return Choice(self.counts, self.widths, dict(values), self.named)


class Wording:
    """The words for one layout in one kind of block; ``region`` puts them together for a choice.

    at: the module that names are relative to, within the block.
    sizes: unit -> how many there are. extents: sizes of what is cut.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Sequence[str],
        layout: Layout,
        entry: Entry,
        row: str,
        inner: Sequence[str],
        norms: Sequence[str],
        handed_on: Sequence[str],
    ) -> None:
        self.model, self.layout, self.entry, self.row, self.inner = model, layout, entry, row, tuple(inner)
        block = model.get_submodule(blocks[0])
        self.modules = dict(block.named_modules())
        parameters = [cut for cut in layout.cuts if cut.kind in ("parameter", "buffer")]
        self.columns = {cut.name.rpartition(".")[0]: cut for cut in parameters if is_column(self.modules, cut)}
        owners = {cut.name.rpartition(".")[0] for cut in parameters}
        self.norms = {
            owner: next(cut for cut in parameters if cut.name.rpartition(".")[0] == owner) for owner in owners if owner in norms
        }
        self.cuts = [
            cut for cut in parameters if (owner := cut.name.rpartition(".")[0]) not in self.norms and owner not in self.columns
        ]
        self.arguments = [cut for cut in layout.cuts if cut.kind == "argument" and cut.name.partition(":")[0] == entry.scope]
        scope = [entry.scope] if entry.scope is not None else []
        self.at = common_module([*self.columns, *(cut.name.rpartition(".")[0] for cut in self.cuts), *self.norms, row, *scope])
        self.anchor = self.modules[self.at]
        self.anchors = [model.get_submodule(f"{name}.{self.at}" if self.at else name) for name in blocks]
        self.handed_on = set(handed_on)
        levels = layout.levels
        self.single = levels.width == 1 and not levels.groups
        self.names = {UNIT: "q" if levels.groups else "inner" if levels.width == 1 else "head", GROUP: "kv", ALL: "kv"}
        self.sizes = {self.names[UNIT]: levels.count, **({"kv": levels.groups} if levels.groups else {})}

    @property
    def may_be_features(self) -> bool:
        """Whether single features are dealt, and nothing needs their number."""
        parts = [*self.layout.row, *(part for cut in self.columns.values() for part in cut.parts)]
        others = [*self.cuts, *self.arguments]
        return self.single and all(part.width == 1 for part in parts) and not others and self.layout.levels.blocks == 1

    @property
    def widths(self) -> list[Part]:
        """Parts whose widths must be said: those that lie beside others."""
        found = [part for cut in self.layout.cuts for part in cut.parts if len({one.width for one in cut.parts}) > 1]
        return list(dict.fromkeys(found))

    @property
    def extents(self) -> set[int]:
        found = {
            sum(part.width * self._count(part) for part in cut.parts) for cut in self.layout.cuts if cut.kind != "argument"
        }
        found |= {part.width * self._count(part) for cut in self.layout.cuts for part in cut.parts if cut.kind != "argument"}
        return found | {sum(part.width * self._count(part) for part in self.layout.row)}

    def totals(self, others: Sequence[Wording]) -> dict[int, list[str]]:
        """Sizes of tensors whose parts are dealt by several units: the sum of them."""
        found: dict[int, list[str]] = {}
        for cut in self.layout.cuts:
            if cut.kind != "argument" and len({part.level for part in cut.parts}) > 1:
                terms = [
                    self.names[part.level]
                    if part.width == 1
                    else f"{self.names[part.level]} * {self.width_names(part, others)[0]}"
                    for part in cut.parts
                ]
                found.setdefault(sum(part.width * self._count(part) for part in cut.parts), []).append(" + ".join(terms))
        return found

    def region(self, choice: Choice) -> tuple[Region, dict[str, Unit], list[Local]]:
        """The region, its units, and the arguments of which ranks have their parts already."""
        content: dict[str, Any] = {"at": self.at}
        if self.entry.scope is None:
            content["enter"] = "columns"
        elif self.entry.scope != self.at:
            content["scope"] = self._relative(self.entry.scope)
        content |= {
            "inputs": self.entry.inputs,
            "columns": {self._relative(name): self._parts(cut.parts, choice) for name, cut in self.columns.items()},
            "rows": {self._relative(self.row): self._parts(self.layout.row, choice)},
            "inner": {self._relative(name): self._parts(self.layout.row, choice) for name in self.inner},
            "norms": {self._relative(name): self._parts(cut.parts, choice) for name, cut in self.norms.items()},
            "cut": {self._relative(cut.name): {"unit": self._parts(cut.parts, choice), "dim": cut.dim} for cut in self.cuts},
            "sum": tuple(self._relative(name) for name in self.entry.sum),
            "set": {name: list(values) for name, values in choice.set.items()},
            "arguments": {
                cut.name.partition(":")[2]: {"unit": self.names[cut.parts[0].level], "dim": cut.dim, "repeated": cut.repeated}
                for cut in self.arguments
                if cut.name.partition(":")[2] not in self.handed_on
            },
        }
        local = [
            Local(name, self.names[cut.parts[0].level], cut.dim)
            for cut in self.arguments
            if (name := cut.name.partition(":")[2]) in self.handed_on
        ]
        return Region(**content), self._units(choice), local

    def count_names(self, unit: str, others: Sequence[Wording] = ()) -> list[str]:
        """Ways to say how many there are of a unit, also in models of other sizes; the number itself last."""
        names = names_of(self.model, self.anchors, self.sizes[unit])
        names = [name for name in names if all(other._look_up(name) == other.sizes[unit] for other in others)]
        return [*names, str(self.sizes[unit])]

    def width_names(self, part: Part, others: Sequence[Wording] = ()) -> list[str]:
        """Ways to say how wide a part is: an attribute of the module, one shared out among units, one of a config."""
        width = part.width
        if width == 1:
            return ["1"]
        names = names_of(self.model, self.anchors, width)
        own = [name for name in names if hasattr(self.anchor, name)]
        shares = [
            f"{name} / {count}"
            for unit, number in self.sizes.items()
            if number > 1
            for count in self.count_names(unit, others)[:1]
            for name in names_of(self.model, self.anchors, width * number)
            if hasattr(self.anchor, name) and count.isidentifier()
        ]
        several = [
            f"{times} * {name}"
            for times in (2, 3)
            if width % times == 0
            for name in names_of(self.model, self.anchors, width // times)
            if hasattr(self.anchor, name)
        ]
        said = [*own, *shares, *several, *(name for name in names if name not in own)]
        return [*(name for name in said if all(other._is(name, self._width_in(other, part)) for other in others)), str(width)]

    def _is(self, expression: str, value: int | None) -> bool:
        def number(name: str) -> int:
            if (found := self._look_up(name)) is None:
                raise KeyError(name)
            return found

        try:
            return evaluate(expression, number, where="") == value
        except PolicyError:
            return False

    def is_like(self, other: Wording) -> bool:
        """Whether the same tensors are cut into the same parts of the same units."""
        return self._shape() == other._shape()

    def gives(self, attribute: str, expression: str) -> bool:
        """Whether an expression has the value of an attribute of the whole."""
        path, _, leaf = attribute.rpartition(".")
        owner: Any = self.anchor
        for part in path.split(".") if path else ():
            owner = getattr(owner, part, None)

        def value(name: str) -> int:
            if name in self.sizes:
                return self.sizes[name]
            own = getattr(owner, name, None)
            found = own if is_number(own) else self._look_up(name)
            if found is None:
                raise KeyError(name)
            return found

        try:
            return evaluate(expression, value, where="") == getattr(owner, leaf, None)
        except PolicyError:
            return False

    def _look_up(self, name: str) -> int | None:
        return look_up(self.model, [self.anchor], name)

    def _shape(self) -> Any:
        cuts = {
            (cut.kind, cut.name, cut.dim, tuple(part.level for part in cut.parts))
            for cut in self.layout.cuts
            if cut.kind != "argument"
        }
        return set(self.sizes), cuts, tuple(part.level for part in self.layout.row)

    def _width_in(self, other: Wording, part: Part) -> int | None:
        """What a width is in a model of other sizes."""
        theirs = {(cut.kind, cut.name): cut.parts for cut in other.layout.cuts}
        for cut in self.layout.cuts:
            for ours, their in zip(cut.parts, theirs.get((cut.kind, cut.name), ()), strict=False):
                if ours == part:
                    return their.width
        return None

    def _units(self, choice: Choice) -> dict[str, Unit]:
        if not choice.named:
            return {}
        blocks = str(self.layout.levels.blocks)
        units = {}
        if "kv" in self.sizes:
            units["kv"] = Unit(count=choice.counts["kv"])
        name = self.names[UNIT]
        units[name] = Unit(count=choice.counts[name], per="kv" if "kv" in self.sizes else None, blocks=blocks)
        return units

    def _parts(self, parts: Sequence[Part], choice: Choice) -> list[str]:
        if not choice.named:
            return [FEATURE] * len(parts)
        usual, _ = max(Counter(part.width for part in parts).items(), key=lambda item: (item[1] > 0, item[0]))
        return [
            self.names[part.level] if part.width == usual else f"{self.names[part.level]} * {choice.widths[part]}"
            for part in parts
        ]

    def _count(self, part: Part) -> int:
        return self.sizes[self.names[part.level]] if part.level != ALL else 1

    def _relative(self, name: str) -> str:
        return name[len(self.at) :].lstrip(".") if self.at else name


def is_column(modules: Mapping[str, nn.Module], cut: CutTensor) -> bool:
    """Whether this is the weight of a linear layer, cut by its outputs."""
    owner, _, leaf = cut.name.rpartition(".")
    module = modules[owner]
    return leaf == "weight" and is_linear(module) and cut.dim == out_dim(module)
