"""Regions that were found, and in which blocks they are right: the numbers on each rank, and the gradients behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oslo_engine.derive.entry import Entry, entry_at
from oslo_engine.derive.experts import flowing, why_not_sum
from oslo_engine.derive.specimen import Kind
from oslo_engine.derive.trial import Local, Truth, match_one, why_not
from oslo_engine.plan.plan import RegionPlan
from oslo_engine.policy.schema import Region, Unit
from oslo_engine.shards import Shard


@dataclass(frozen=True)
class Found:
    """A region that is right in some kinds of blocks.

    place: its row or scope within the first of them. told: what was seen, for people.
    """

    region: Region
    units: dict[str, Unit]
    local: tuple[Local, ...]
    kinds: tuple[Kind, ...]
    place: str
    told: str


@dataclass
class Findings:
    """regions; for linear layers that lead to none the reason; the modules of the blocks looked into that ran."""

    regions: list[Found] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)


def is_right(found: Found, truth: Truth, tp: int = 2) -> bool:
    """Whether a region is right in a block."""
    if found.region.leave == "scope":
        return why_not_sum(truth, found.region, found.units, min(tp, 3)) is None
    return why_not(truth, found.region, found.units, tp, found.local) is None


def is_entered(found: Found, truth: Truth) -> bool:
    """Whether activations enter a region in a block as its policy says, so that gradients are whole behind it.

    What is right for numbers may be wrong for gradients: another kind of block may use a parameter of the region's module
    behind the row, or give the module one more argument through which gradients flow.

    Raises:
        OsloError: the region does not fit.
    """
    plans, shards = match_one(truth, found.region, found.units, 2)
    return all(_is_entered(found, plan, shards, truth) for plan in plans)


def at_columns(found: Found, truth: Truth) -> dict[str, Any] | None:
    """The fields with which activations enter a region of a block at its columns; None where they cannot.

    Raises:
        OsloError: the region does not fit.
    """
    plans, shards = match_one(truth, found.region, found.units, 2)
    entries = [_entry(found, plan, row, shards, truth, None) for plan in plans[:1] for row in plan.rows]
    if len(entries) != 1 or not isinstance(entries[0], Entry):
        return None
    at = f"{found.region.at}." if found.region.at else ""
    if not all(name.startswith(at) for name in entries[0].sum):
        return None
    names = tuple(name.removeprefix(at) for name in entries[0].sum)
    return {"enter": "columns", "inputs": (), "sum": names, "scope": type(found.region).model_fields["scope"].default}


def _is_entered(found: Found, plan: RegionPlan, shards: Mapping[str, Shard], truth: Truth) -> bool:
    if plan.leave == "scope":
        call = truth.calls.get(plan.scope)
        return call is None or flowing(truth.specimen.model.get_submodule(plan.scope), call) == plan.inputs
    scope = _inside(truth, [plan.scope])[0] if plan.enter == "scope" else None
    ran = [row for row in plan.rows if row in truth.calls]
    entries = [_entry(found, plan, row, shards, truth, scope) for row in ran]
    return all(
        isinstance(entry, Entry) and entry.inputs == plan.inputs and set(entry.sum) == set(_inside(truth, plan.summed))
        for entry in entries
    )


def _entry(
    found: Found, plan: RegionPlan, row: str, shards: Mapping[str, Shard], truth: Truth, scope: str | None
) -> Entry | str:
    rows = {*plan.rows, *plan.inner}
    owners = _inside(truth, sorted({owner for name in shards if (owner := name.rpartition(".")[0]) not in rows}))
    parts = [*(one.name for one in found.local), *found.region.arguments]
    return entry_at(truth.specimen, truth.block, scope, _inside(truth, plan.columns), owners, _inside(truth, [row])[0], parts)


def _inside(truth: Truth, names: Iterable[str]) -> list[str]:
    return [name[len(truth.block) + 1 :] for name in names]
