"""From the regions of all blocks to one policy: units that regions share, names, and why the rest stays whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from oslo_engine.derive.found import Findings, Found, at_columns, is_entered, is_right
from oslo_engine.derive.specimen import Kind
from oslo_engine.derive.stacks import Stack
from oslo_engine.derive.trial import Truth, match_one
from oslo_engine.errors import OsloError
from oslo_engine.plan.match import match_policy
from oslo_engine.plan.names import Names, names_part
from oslo_engine.policy.schema import Policy, Region, Unit, Vocabulary

_LISTS = ("columns", "rows", "inner", "norms", "cut")
_WAY_IN = ("scope", "enter", "inputs", "sum")


def joined(regions: Sequence[Found], truths: Mapping[Kind, Truth]) -> list[Found]:
    """Regions at one place with the same rows become one; what some blocks lack may be missing."""
    found: list[Found] = []
    for new in regions:
        for at, old in enumerate(found):
            if (both := _both(old, new, truths)) is not None:
                found[at] = both
                break
        else:
            found.append(new)
    return found


def _both(old: Found, new: Found, truths: Mapping[Kind, Truth]) -> Found | None:
    """One region in place of two, if it is right wherever they were."""
    if not _fit(old, new):
        return None
    rules = {kind: _union(getattr(old.region, kind), getattr(new.region, kind)) for kind in _LISTS}
    units = {**new.units, **old.units}
    ways_in = _ways_in(old, new, truths)
    for way_in in ways_in:
        for values in ({**new.region.set, **old.region.set}, _union(old.region.set, new.region.set)):
            region = Region(**(old.region.model_dump() | rules | way_in | {"set": values}))
            both = Found(region, units, (*old.local, *new.local), old.kinds + new.kinds, old.place, old.told)
            if all(is_right(both, truths[kind]) for kind in both.kinds) and (
                len(ways_in) == 1 or all(is_entered(both, truths[kind]) for kind in both.kinds)
            ):
                return both
    return None


def _ways_in(old: Found, new: Found, truths: Mapping[Kind, Truth]) -> list[dict[str, Any]]:
    """Where activations may enter what is one region: as in either, if they differ also at the columns."""
    found = [{name: getattr(one.region, name) for name in _WAY_IN} for one in (old, new)]
    if found[0] == found[1]:
        return found[:1]
    for one in (old, new):
        way_in = at_columns(one, truths[one.kinds[0]]) if one.region.leave == "rows" else None
        if way_in is not None and way_in not in found:
            found.append(way_in)
    return found


def _fit(one: Found, other: Found) -> bool:
    if any(one.units[unit] != other.units[unit] for unit in one.units.keys() & other.units.keys()):
        return False
    a, b = one.region, other.region
    alike = all(getattr(a, kind) == getattr(b, kind) for kind in ("at", "rows", "arguments", "leave", "experts"))
    alike &= all(b.set.get(name, value) == value for name, value in a.set.items())
    return alike and all(
        _bare(getattr(a, kind)).get(name, value) == value for kind in _LISTS for name, value in _bare(getattr(b, kind)).items()
    )


def _bare(rules: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("maybe "): value for name, value in rules.items()}


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys([*_bare(one), *_bare(other)])
    both = {**_bare(other), **_bare(one)}
    return {name if name in one and name in other else f"maybe {name}": both[name] for name in names}


def told_apart(regions: Sequence[Found], truths: Mapping[Kind, Truth]) -> list[Found]:
    """Regions that would also stand where they are wrong get a module that they need and that is missing there."""
    return [_with_needs(one, truths) for one in regions]


def _with_needs(one: Found, truths: Mapping[Kind, Truth]) -> Found:
    wrong = [kind for kind in truths if kind not in one.kinds and _stands(one, truths[kind])]
    if not wrong:
        return one
    for needed in dict.fromkeys([*one.region.columns, *one.region.rows, *one.region.norms]):
        path = needed.removeprefix("maybe ")
        region = one.region.model_copy(update={"needs": path})
        narrower = dataclasses.replace(one, region=region)
        if all(_stands(narrower, truths[kind]) for kind in one.kinds) and not any(
            _stands(narrower, truths[kind]) for kind in wrong
        ):
            return narrower
    return one


def _stands(one: Found, truth: Truth) -> bool:
    try:
        plans, _ = match_one(truth, one.region.model_copy(update={"optional": True}), one.units, 2)
    except OsloError:
        return True
    return bool(plans)


def make_policy(
    name: str,
    model_type: str,
    model: PreTrainedModel,
    stacks: Mapping[str, Stack],
    found: Sequence[Found],
    vocabulary: Vocabulary,
    findings: Findings,
) -> Policy:
    """
    Raises:
        PolicyError, PlanError: the regions contradict each other.
    """
    shared = _shared_units(found)
    regions: dict[str, Region] = {}
    for one in found:
        own = {unit: value for unit, value in one.units.items() if unit not in shared}
        regions[_fresh(_region_name(one.region), regions)] = one.region.model_copy(update={"units": own})
    base = Names(model).base
    content: dict[str, Any] = {
        "name": name,
        "models": (model_type,),
        "stacks": {label: stack.pattern.removeprefix(base) for label, stack in stacks.items()},
        "units": {unit: value.model_dump() for unit, value in shared.items()},
        "regions": {label: region.model_dump() for label, region in regions.items()},
        "vocabulary": vocabulary.model_dump(),
    }
    anything = Policy(**content, replicate={"maybe *": "to be said"})
    whole = match_policy(model, anything, 2).replicated
    return Policy(**content, replicate=_reasons(model, stacks, base, set(whole), findings))


def _shared_units(found: Sequence[Found]) -> dict[str, Unit]:
    """Units that mean the same in every region that has one of that name, and do not depend on the region's module."""
    shared: dict[str, Unit] = {}
    for name in dict.fromkeys(unit for one in found for unit in one.units):
        values = [one.units[name] for one in found if name in one.units]
        if all(value == values[0] for value in values):
            shared[name] = values[0]
    return {name: unit for name, unit in shared.items() if unit.per is None or unit.per in shared}


def _region_name(region: Region) -> str:
    words = [word for word in f"{region.at}.{region.scope}".split(".") if word and word != "*"]
    return words[-1] if words else next(iter([*region.rows, *region.cut])).split(".")[0]


def _fresh(name: str, taken: Mapping[str, Any]) -> str:
    return name if name not in taken else next(f"{name}_{at}" for at in range(2, 1000) if f"{name}_{at}" not in taken)


def _reasons(
    model: PreTrainedModel, stacks: Mapping[str, Stack], base: str, whole: set[str], findings: Findings
) -> dict[str, str]:
    """Why each rank holds a matrix whole."""
    blocks = [block for stack in stacks.values() for block in stack.blocks]
    reasons: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in whole or parameter.ndim < 2:
            continue
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        inside = name[len(block) + 1 :] if block is not None else name.removeprefix(base)
        path, _, leaf = inside.rpartition(".")
        if not any(names_part(rule, name) for rule in reasons):
            rule = _pattern(path if leaf == "weight" and path else inside)
            reasons[rule] = "outside the blocks" if block is None else _reason(f"{block}.{path}", findings)
    return reasons


def _reason(module: str, findings: Findings) -> str:
    if module in findings.refused:
        return findings.refused[module].splitlines()[0]
    ran = module in findings.ran or module.rpartition(".")[0] in findings.ran
    return "every unit depends on all of it" if ran else "it does not run"


def _pattern(name: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
