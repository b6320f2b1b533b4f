"""Finding the attributes that a rank must have of its own, and names for numbers: by trying which ones make its part right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oslo_engine.derive.numbers import attributes_of, is_number, names_of
from oslo_engine.derive.trial import Truth, why_not
from oslo_engine.derive.units import Part
from oslo_engine.derive.wording import Choice, Wording

_MOST_TRIALS = 200
_MOST_NAMES = 40
_MOST_SETS = 3  # attributes set together, beyond trying all of them
Values = tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A block to try things on, with how many ranks; whether it has the sizes of the block that was looked into."""

    truth: Truth
    tp: int
    first_size: bool = True


class Search:
    """Looks for the choice of words with which a region is right in all cases.

    Args:
        wording: made from the first case's model.
        others: the same region as it was seen in models of other sizes: names must hold there too.
        cases: tried in order; the later ones have other sizes or another attention.
    """

    def __init__(self, wording: Wording, others: Sequence[Wording], cases: Sequence[Case]) -> None:
        self.wording, self.cases = wording, cases
        self.others = others
        self._totals = wording.totals(others)
        self.trials = 0
        self.first_problem: str | None = None
        self._wrong: set[str] = set()
        self._order = list(cases)  # the one that found the last fault first

    def run(self) -> Choice | str:
        """The choice, or what stayed wrong."""
        wording = self.wording
        counts = {unit: wording.count_names(unit, self.others) for unit in wording.sizes}
        widths = {part: wording.width_names(part, self.others) for part in wording.widths}
        start = Choice({unit: names[0] for unit, names in counts.items()}, {part: names[0] for part, names in widths.items()})
        if wording.may_be_features and self._works(plain := Choice({}, {}, {}, named=False)):
            return plain
        literal = Choice(
            {unit: names[-1] for unit, names in counts.items()}, {part: names[-1] for part, names in widths.items()}
        )
        attributes = self._attributes(counts)
        values = self._find_set(literal, attributes)
        if values is None:
            return self.first_problem or "no attributes were found that make a rank's part right"
        return self._name(start, counts, widths, values, attributes)

    # -- which attributes

    def _find_set(self, choice: Choice, attributes: Mapping[str, list[Values]]) -> dict[str, Values] | None:
        """The fewest attributes with which the model of the first size is right."""
        here = [case for case in self.cases if case.first_size]

        def works(values: Mapping[str, Values]) -> bool:
            return self._works(choice.with_set(values), here)

        if works({}):
            return {}
        own = {name: options for name, options in attributes.items() if ".config." not in f".{name}"}
        for some in (own, attributes):
            for picked in self._sets(some):
                if works(picked):
                    return self._without_needless(picked, works)
                if self.trials > _MOST_TRIALS:
                    return None
        return None

    def _sets(self, attributes: Mapping[str, list[Values]]) -> Iterator[dict[str, Values]]:
        for left_out in (0, 1, 2):
            for names in itertools.combinations(attributes, len(attributes) - left_out) if len(attributes) > left_out else ():
                yield {name: attributes[name][0] for name in names}
        for number in range(1, _MOST_SETS + 1):
            for names in itertools.combinations(attributes, number):
                for options in itertools.product(*(_distinct(attributes[name], self._value) for name in names)):
                    yield dict(zip(names, options, strict=True))

    def _value(self, option: Values) -> Any:
        """What tells options apart here: an expression's units."""
        return tuple(tuple(unit for unit in self.wording.sizes if unit in expression.split()) for expression in option)

    def _without_needless(self, values: dict[str, Values], works: Callable[[Mapping[str, Values]], bool]) -> dict[str, Values]:
        for name in list(values):
            fewer = {other: value for other, value in values.items() if other != name}
            if works(fewer):
                values = fewer
        return values

    def _attributes(self, counts: Mapping[str, Sequence[str]]) -> dict[str, list[Values]]:
        """Attributes whose values have to do with what is cut, and what they may be on a rank."""
        sizes = self.wording.sizes
        told = self.wording.extents | set(sizes.values())
        if sizes.get("kv"):
            told.add(sizes["q"] // sizes["kv"])
        found: dict[str, list[Values]] = {}
        for name, value in attributes_of(self.wording.anchor):
            if value in told and (options := self._holding(name, self._options(name, value, counts))):
                found[name] = [(option,) for option in options]
        for path, module in self.wording.anchor.named_modules():
            prefix = f"{path}." if path else ""
            for name, value in vars(module).items():
                if (
                    isinstance(value, (tuple, list))
                    and value
                    and all(is_number(each) for each in value)
                    and any(each in told for each in value)
                ):
                    each_said = [
                        self._options(f"{prefix}{name}", each, counts)[:1] if each in told else [str(each)] for each in value
                    ]
                    if all(each_said):
                        found[f"{prefix}{name}"] = [tuple(options[0] for options in each_said)]
            config = getattr(module, "config", None)
            for name, value in vars(config).items() if config is not None else ():
                if is_number(value) and value in told:
                    options = self._holding(f"{prefix}config.{name}", self._options(name, value, counts))
                    found |= {f"{prefix}config.{name}": [(option,) for option in options]} if options else {}
        return found

    def _options(self, name: str, value: int, counts: Mapping[str, Sequence[str]]) -> list[str]:
        """Expressions of units that have this value for the whole."""
        sizes, found = self.wording.sizes, list(self._totals.get(value, ()))
        leaf = name.rpartition(".")[2]
        found += [unit for unit, count in sizes.items() if value == count > 1]
        if sizes.get("kv", 1) > 1 and sizes["q"] // sizes["kv"] == value and value > 1:
            found.insert(0, "q / kv")
        for unit, count in sizes.items():
            if value % count or value == count or count == 1:
                continue
            widths = names_of(self.wording.model, self.wording.anchors, value // count)
            own = [width for width in widths if hasattr(self.wording.anchor, width)]
            found += [f"{unit} * {width}" for width in own[:2]]
            found += [f"{leaf} * {unit} / {name}" for name in counts[unit][:2] if name.isidentifier()]
            found += [f"{unit} * {width}" for width in widths if width not in own][:2]
            found.append(f"{unit} * {value // count}")
        return found

    def _holding(self, name: str, options: Sequence[str]) -> list[str]:
        """The expressions that give the whole's value of an attribute in the models of other sizes too."""
        return [option for option in options if all(other.gives(name, option) for other in (self.wording, *self.others))]

    # -- which names

    def _name(
        self,
        start: Choice,
        counts: Mapping[str, Sequence[str]],
        widths: Mapping[Part, Sequence[str]],
        values: Mapping[str, Values],
        attributes: Mapping[str, list[Values]],
    ) -> Choice | str:
        """Names for the numbers that hold at all sizes."""
        alike = {
            name: [option for option in attributes[name] if self._value(option) == self._value(value)]
            for name, value in values.items()
        }
        names = [*counts.values(), *widths.values(), *alike.values()]
        self.trials = 0
        for picked in itertools.islice(_in_order(names), _MOST_NAMES):
            some = list(picked)
            choice = Choice(
                dict(zip(counts, some, strict=False)),
                dict(zip(widths, some[len(counts) :], strict=False)),
                dict(zip(alike, some[len(counts) + len(widths) :], strict=False)),
            )
            if self._works(choice):
                return choice
        return "no names were found whose numbers hold at other sizes"

    # -- trying

    def _works(self, choice: Choice, cases: Sequence[Case] | None = None) -> bool:
        region, units, local = self.wording.region(choice)
        said = repr((region, units, local))
        if said in self._wrong and cases is None:
            return False
        for case in self._order if cases is None else cases:
            self.trials += 1
            problem = why_not(case.truth, region, units, case.tp, local)
            if problem is not None:
                self.first_problem = self.first_problem or problem
                if cases is None:
                    self._wrong.add(said)
                    self._order = [case, *(other for other in self._order if other is not case)]
                return False
        return True


def _distinct(options: Sequence[Values], key: Callable[[Values], Any]) -> list[Values]:
    found: dict[Any, Values] = {}
    for option in options:
        found.setdefault(key(option), option)
    return list(found.values())


def _in_order(lists: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Combinations, those with the first of most lists first."""
    picks = itertools.product(*(range(len(one)) for one in lists))
    for pick in sorted(itertools.islice(picks, 20000), key=sum):
        yield tuple(one[at] for one, at in zip(lists, pick, strict=True))
