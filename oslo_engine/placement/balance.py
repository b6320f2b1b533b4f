"""Making a device map: blocks in the order in which they run, cut where the fullest device is least full.

Every block carries what lies beside it because of it: the first one the embeddings (and with tied weights the head), the last
one the norm and the head. So the devices at the ends get fewer blocks, by as much as that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from oslo_engine.errors import PlanError
from oslo_engine.placement.assignment import Part, bound_together, parts_of
from oslo_engine.placement.stacks import Stack

Cost = Callable[[Part], float]


def balanced_map(
    model: PreTrainedModel,
    stacks: Sequence[Stack],
    capacities: Mapping[torch.device, float],
    cost: Cost,
    *,
    fewest: bool = False,
    passing: float = 0.0,
) -> dict[str, torch.device]:
    """The device of every block.

    Args:
        capacities: bytes that each device has, in the order in which they are to be used; infinite where nothing is known.
        cost: bytes that a part takes.
        fewest: fill as few devices as the model needs, instead of all. Devices work one after another, so that is no slower.
        passing: bytes that every device must have free besides.

    Raises:
        PlanError: the model has no blocks, or does not fit on these devices; says by how much.
    """
    runs = _runs(model, stacks, cost)
    if not runs:
        raise PlanError(
            "a model without lists of blocks cannot be balanced",
            where=type(model).__name__,
            hint='place it as a whole, device_map={"": 0}, or name modules',
        )
    devices = list(capacities)
    limits = [capacities[device] - passing for device in devices]
    costs = [size for _, size in runs]
    for count in range(1 if fewest else len(devices), len(devices) + 1):
        cuts = _cut(costs, limits[:count]) if min(limits[:count]) > 0 else None
        if cuts is not None:
            placed = {}
            for device, (start, end) in zip(devices, pairwise([0, *cuts]), strict=False):
                placed.update({block: device for blocks, _ in runs[start:end] for block in blocks})
            return placed
    raise _does_not_fit(model, runs, capacities, passing)


def _runs(model: PreTrainedModel, stacks: Sequence[Stack], cost: Cost) -> list[tuple[list[str], float]]:
    """(blocks that stay together, bytes of them and of all that goes where they go), in the order of the model."""
    parts = parts_of(model, stacks)
    order = [part.path for part in parts if part.is_block]
    position = {path: at for at, path in enumerate(order)}
    sizes = [0.0] * len(order)
    joined = list(range(len(order)))  # the last block that must lie with this one
    seen: set[int] = set()
    for group in bound_together(model, parts):
        blocks = [position[part.path] for part in group if part.is_block]
        home = blocks[0] if blocks else position.get(group[0].neighbour or "", 0)
        if order:
            sizes[home] += sum(cost(part) for part in group if id(model.get_submodule(part.path)) not in seen)
        seen |= {id(model.get_submodule(part.path)) for part in group}
        if len(blocks) > 1:
            joined[blocks[0]] = max(blocks[-1], joined[blocks[0]])
    runs: list[tuple[list[str], float]] = []
    end = -1
    for at, path in enumerate(order):
        if at > end:
            runs.append(([], 0.0))
        end = max(end, joined[at])
        runs[-1] = ([*runs[-1][0], path], runs[-1][1] + sizes[at])
    return runs


def _cut(costs: Sequence[float], limits: Sequence[float]) -> list[int] | None:
    """Where the runs of each device end, so that the largest share of a device's limit is smallest; None if that exceeds 1."""
    known = [limit for limit in limits if limit != float("inf")]
    weights = [limit if limit != float("inf") else (max(known, default=1.0)) for limit in limits]

    def fill(share: float) -> list[int] | None:
        ends, at = [], 0
        for weight in weights:
            left = share * weight * (1 + 1e-9)
            while at < len(costs) and costs[at] <= left:
                left -= costs[at]
                at += 1
            ends.append(at)
        return ends if at == len(costs) else None

    low, high = 0.0, max(1.0, sum(costs)) / min(weights)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if fill(middle) else (middle, high)
    fits = high <= 1 + 1e-6 or not known
    return fill(high) if fits else None


def _does_not_fit(
    model: PreTrainedModel, runs: Sequence[tuple[list[str], float]], capacities: Mapping[torch.device, float], passing: float
) -> PlanError:
    needed, there = sum(size for _, size in runs) + passing * len(capacities), sum(capacities.values())
    largest = max(runs, key=lambda run: run[1])
    missing = needed - there
    what = f"{_size(missing)} too little" if missing > 0 else "enough in all, but no cut between blocks fits every device"
    return PlanError(
        "the model does not fit on these devices",
        where=type(model).__name__,
        expected=f"{_size(needed)}, of which {_size(largest[1])} in one piece ({largest[0][0]} and what goes with it)"
        + (f", and {_size(passing)} on each device for a moment" if passing else ""),
        got=f"{', '.join(f'{device}: {_size(size)}' for device, size in capacities.items())}: {what}",
        hint="use more or larger devices, a shorter dtype, or a smaller batch; oslo-engine plan says what suffices",
    )


def _size(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.3g} MiB"
