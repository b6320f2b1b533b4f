"""How many items a policy's units have at some place of a model, and the shards that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from oslo_engine.errors import PolicyError
from oslo_engine.plan.expressions import evaluate
from oslo_engine.policy.schema import Unit
from oslo_engine.shards import Deal, Shard, deal_evenly, deal_features, deal_groups, packed_shard

FEATURE = "feature"


class Units:
    """The units of one region at one module, dealt to ``tp`` ranks.

    Args:
        model: its config and the module's attributes are where numbers come from, the module's first.
        module: the region's module.
        units: of the policy and the region.
        wheres: file:line of each unit.
    """

    def __init__(
        self, model: PreTrainedModel, module: nn.Module, units: Mapping[str, Unit], tp: int, wheres: Mapping[str, str]
    ) -> None:
        self.model, self.module, self.units, self.tp, self.wheres = model, module, units, tp, wheres
        self._deals: dict[str, Deal] = {}

    def deal(self, name: str, where: str) -> Deal:
        """
        Raises:
            PolicyError: no such unit, or its count is no number here.
            PlanError: there are too few items for the ranks.
        """
        if name not in self.units:
            raise PolicyError(f"unknown unit {name!r}", where=where, expected=", ".join([*self.units, FEATURE]))
        if name not in self._deals:
            unit = self.units[name]
            sharers = next((other for other, one in self.units.items() if one.per == name), None)
            if unit.per is not None:
                self._deal_groups(name, unit.per)
            elif sharers is not None:
                self._deal_groups(sharers, name)
            else:
                what = self._what(name)
                blocks = evaluate(unit.blocks, self._number, where=self.wheres[name])
                self._deals[name] = deal_evenly(self._count(name), self.tp, blocks=blocks, what=what)
        return self._deals[name]

    def shard(self, shape: Sequence[int], dim: int, parts: Sequence[str], where: str) -> Shard:
        """The shard of a dimension whose parts lie one after another.

        Args:
            parts: each ``unit`` or ``unit * width``. Those without a width share the rest, every item equally wide.

        Raises:
            PolicyError: the sizes do not add up.
        """
        size = shape[dim]
        named = [self.part(part, where) for part in parts]
        features = sum(width or 1 for unit, width in named if unit == FEATURE)
        known = sum(self.deal(unit, where).count * width for unit, width in named if width and unit != FEATURE)
        open_units = [unit for unit, width in named if width is None and unit != FEATURE]
        if features and open_units:
            raise PolicyError("beside features the other parts need a width", where=where, got=", ".join(parts))
        rest = size - known
        items = features or sum(self.deal(unit, where).count for unit in open_units)
        if rest < 0 or (rest % items if items else rest):
            what = "the size is no multiple of the number of items" if items else "the parts do not add up to the size"
            open_part = f"a multiple of {items}" if items else ""
            raise PolicyError(
                what,
                where=where,
                expected=f"{' and '.join(filter(None, [str(known) if known else '', open_part]))} ({' + '.join(parts)})",
                got=f"dimension {dim} of {tuple(shape)}: {size}",
            )
        dealt = []
        for unit, width in named:
            if unit == FEATURE:
                dealt.append((deal_features(rest // items, self.tp), width or 1))
            else:
                dealt.append((self.deal(unit, where), rest // items if width is None else width))
        if len({deal.blocks for deal, _ in dealt}) > 1:
            raise PolicyError("all parts of a weight must lie in the same blocks", where=where, got=", ".join(parts))
        return packed_shard(dim, dealt)

    def part(self, part: str, where: str) -> tuple[str, int | None]:
        """``unit * width`` -> (unit, width); None where no width is given."""
        unit, _, width = part.replace(" ", "").partition("*")
        return unit, self.value(width, 0, where) if width else None

    def has(self, attribute: str, value: object) -> bool:
        """Whether the module or the config has this attribute with this value."""
        return any(getattr(owner, attribute, None) == value for owner in _owners(self.model, [self.module]))

    def value(self, expression: str, rank: int, where: str, module: nn.Module | None = None) -> int:
        """An expression on a tp rank: units mean this rank's number of items."""

        def lookup(name: str) -> int:
            if name in self.units:
                return self.deal(name, where).local(rank)
            return self._number(name, module)

        return evaluate(expression, lookup, where=where)

    def _number(self, name: str, module: nn.Module | None = None) -> int:
        number = look_up(self.model, [*([] if module is None else [module]), self.module], name)
        if number is None:
            raise KeyError(name)
        return number

    def _count(self, name: str) -> int:
        where = self.wheres[name]
        try:
            return evaluate(self.units[name].count, self._number, where=where)
        except PolicyError as error:
            raise PolicyError(
                f"the unit {name!r} has no count here: {error.what}",
                where=where,
                expected=error.expected,
                got=f"{self.units[name].count!r} in {type(self.module).__name__}, {type(self.model.config).__name__}",
            ) from None

    def _deal_groups(self, queries: str, groups: str) -> None:
        if groups not in self.units:
            raise PolicyError(f"unknown unit {groups!r}", where=self.wheres[queries], expected=", ".join(self.units))
        if {self.units[queries].blocks, self.units[groups].blocks} != {"1"} or self.units[groups].per:
            raise PolicyError("a unit with `per` cannot have blocks or shares of shares", where=self.wheres[queries])
        others = [name for name, unit in self.units.items() if unit.per == groups]
        base = self._count(groups)
        for name in others:
            self._deals[name], self._deals[groups] = deal_groups(self._count(name), base, self.tp, what=self._what(name))

    def _what(self, name: str) -> str:
        return f"{self.units[name].count} of {type(self.model).__name__}"


def look_up(model: PreTrainedModel, modules: Sequence[nn.Module], name: str) -> int | None:
    """The whole number of this name (or dotted path): of the modules first, then of the last one's config, then the model's."""
    for owner in _owners(model, modules):
        value: Any = owner
        try:
            for part in name.split("."):
                value = getattr(value, part, None)
        except Exception:  # configs with settings for each layer refuse to give one for all
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _owners(model: PreTrainedModel, modules: Sequence[nn.Module]) -> list[Any]:
    return [*modules, getattr(modules[-1], "config", None), model.config.get_text_config(), model.config]
