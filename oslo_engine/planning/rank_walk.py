"""Walking a rank's schedule: how full it gets, how many micro-batches are in flight, how long it idles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from oslo_engine.pipeline.orders import Action, ActionKind, Orders, round_length
from oslo_engine.pipeline.timeline import Event
from oslo_engine.planning.stage_costs import StageCosts

_ROUNDS = 2  # of pp micro-batches, or of those that the schedule goes in
_AT_ONCE, _FOR_NOBODY = 0, 1


@dataclass(frozen=True)
class Steps:
    """The computations of one rank, in order, as tensors.

    stage: of each. sign: 1 where it keeps what a forward leaves, -1 where it frees that. peak: whose peak it has (0 forward,
    1 backward, 2 none). in_flight: the most (stage, micro-batch) pairs between forward and backward.
    """

    stage: Tensor
    sign: Tensor
    peak: Tensor
    in_flight: int


def steps_of(actions: Sequence[Action]) -> Steps:
    """A split backward (zero bubble) frees what it kept only with the weight gradients."""
    splits = any(action.kind is ActionKind.BACKWARD_WEIGHT for action in actions)
    rows: list[tuple[int, int, int]] = []
    flying = most = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            rows.append((action.stage, 1, 0))
            flying += 1
            most = max(most, flying)
        elif action.kind is ActionKind.BACKWARD or action.kind is ActionKind.BACKWARD_INPUT:
            rows.append((action.stage, 0 if splits and action.kind is not ActionKind.BACKWARD else -1, 1))
            flying -= 1
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            rows.append((action.stage, -1, 2))
    stage, sign, peak = torch.tensor(rows).T
    return Steps(stage, sign, peak, most)


def peak_bytes(steps: Sequence[Steps], costs: Sequence[StageCosts]) -> list[int]:
    """The most bytes of activations on each rank in a batch.

    Args:
        steps: of every rank.
        costs: of every stage.
    """
    kept = torch.tensor([cost.forward.kept for cost in costs])
    peaks = torch.tensor([[cost.forward.peak, cost.backward.peak, 0] for cost in costs])
    found = []
    for rank in steps:
        changes = rank.sign * kept[rank.stage]
        before = changes.cumsum(0) - changes
        found.append(max(0, int((before + peaks[rank.stage, rank.peak]).max())))
    return found


def simulated_count(schedule: str, pp: int, micro_batches: int) -> int:
    """How many micro-batches suffice to see what a batch of these does: after some rounds every further one is the same."""
    if micro_batches <= _ROUNDS * pp:
        return micro_batches
    length = round_length(schedule, pp, micro_batches)
    return _ROUNDS * length if length else _ROUNDS * pp + micro_batches % pp


def idle_share(orders: Orders, forward: Sequence[float], backward: Sequence[float]) -> float:
    """The bubble: the share of a batch's time in which the ranks wait, all together, if messages took no time.

    Args:
        orders: of all ranks.
        forward, backward: seconds of each stage for a micro-batch; a split backward is halved.
    """
    tasks = _tasks(orders, forward, backward)
    starts = _starts(tasks)
    busy = sum(task.took for row in tasks for task in row)
    whole = max((begun[-1] + row[-1].took for row, begun in zip(tasks, starts, strict=True) if row), default=0.0) * len(tasks)
    return 1 - busy / whole if whole else 0.0


def walk(orders: Orders, forward: Sequence[float], backward: Sequence[float]) -> list[list[Event]]:
    """What every rank computes when, from second 0 on; arguments as of ``idle_share``."""
    tasks = _tasks(orders, forward, backward)
    return [
        [
            Event(task.action.kind, task.action.stage, task.action.micro, at, at + task.took)
            for task, at in zip(row, begun, strict=True)
        ]
        for row, begun in zip(tasks, _starts(tasks), strict=True)
    ]


class _Task(NamedTuple):
    """A computation. needs, gives: the places of the results that it waits for and makes, in a table of all results."""

    action: Action
    took: float
    needs: int
    gives: int


def _tasks(orders: Orders, forward: Sequence[float], backward: Sequence[float]) -> list[list[_Task]]:
    """Of every rank, without sends and receives. The table begins with what is there at once and what nobody waits for."""
    stages, last = 2 * orders.num_stages, orders.num_stages - 1
    rows = []
    for actions in orders.actions:
        row = []
        for action in actions:
            stage, kind, micro = action
            at, needs, gives = 2 + stages * micro + 2 * stage, _AT_ONCE, _FOR_NOBODY
            if kind is ActionKind.FORWARD:
                took, gives = forward[stage], at
                if stage > 0:
                    needs = at - 2
            elif kind is ActionKind.BACKWARD or kind is ActionKind.BACKWARD_INPUT:
                took, gives = backward[stage] / (1 if kind is ActionKind.BACKWARD else 2), at + 1
                needs = at if stage == last else at + 3
            elif kind is ActionKind.BACKWARD_WEIGHT:
                took = backward[stage] / 2
            else:
                continue
            row.append(_Task(action, took, needs, gives))
        rows.append(row)
    return rows


def _starts(tasks: Sequence[Sequence[_Task]]) -> list[list[float]]:
    """When every task begins."""
    most = max((task.gives for row in tasks for task in row), default=0)
    done: list[float | None] = [None] * (most + 4)
    done[_AT_ONCE] = 0.0
    clock = [0.0] * len(tasks)
    starts: list[list[float]] = [[] for _ in tasks]
    ranks = list(range(len(tasks)))
    while ranks:
        waiting = []
        moved = False
        for rank in ranks:
            row, begun, now = tasks[rank], starts[rank], clock[rank]
            before = len(begun)
            for _, took, needs, gives in islice(row, before, None):
                ready = done[needs]
                if ready is None:
                    break
                start = max(now, ready)
                begun.append(start)
                now = done[gives] = start + took
            clock[rank] = now
            moved = moved or len(begun) > before
            if len(begun) < len(row):
                waiting.append(rank)
        assert moved or not waiting, "the orders wait for one another"
        ranks = waiting
    return starts
