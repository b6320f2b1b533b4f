"""Walking a rank's schedule: how full it gets, how many micro-batches are in flight, how long it idles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oslo_engine.pipeline.orders import Action, ActionKind, Orders, takes
from oslo_engine.pipeline.timeline import Event
from oslo_engine.planning.stage_costs import StageCosts

_ROUNDS = 4  # of pp micro-batches


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
        elif action.kind.starts_backward:
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
    if takes(schedule, pp, micro_batches) and not takes(schedule, pp, _ROUNDS * pp + micro_batches % pp):
        return _ROUNDS * (micro_batches // (micro_batches // pp))  # rounds that are longer than pp
    return _ROUNDS * pp + micro_batches % pp


def idle_share(orders: Orders, forward: Sequence[float], backward: Sequence[float]) -> float:
    """The bubble: the share of a batch's time in which the ranks wait, all together, if messages took no time.

    Args:
        orders: of all ranks.
        forward, backward: seconds of each stage for a micro-batch; a split backward is halved.
    """
    events = walk(orders, forward, backward)
    busy = sum(event.end_s - event.start_s for row in events for event in row)
    whole = max((row[-1].end_s for row in events if row), default=0.0) * len(events)
    return 1 - busy / whole if whole else 0.0


def walk(orders: Orders, forward: Sequence[float], backward: Sequence[float]) -> list[list[Event]]:
    """What every rank computes when, from second 0 on; arguments as of ``idle_share``."""
    position = [0] * len(orders.actions)
    clock = [0.0] * len(orders.actions)
    events: list[list[Event]] = [[] for _ in orders.actions]
    done: dict[tuple[int, bool, int], float] = {}  # (stage, whether backward, micro-batch) -> when its result is there
    ranks = list(range(len(orders.actions)))
    while ranks:
        waiting = []
        moved = False
        for rank in ranks:
            actions = orders.actions[rank]
            while position[rank] < len(actions):
                action = actions[position[rank]]
                took = _seconds(action, forward, backward)
                ready = _ready(action, done, orders.num_stages)
                if ready is None:
                    break
                if took:
                    start = max(clock[rank], ready)
                    clock[rank] = start + took
                    events[rank].append(Event(action.kind, action.stage, action.micro, start, clock[rank]))
                    if action.kind is ActionKind.FORWARD or action.kind.starts_backward:
                        done[action.stage, action.kind is not ActionKind.FORWARD, action.micro] = clock[rank]
                position[rank] += 1
                moved = True
            if position[rank] < len(actions):
                waiting.append(rank)
        assert moved, "the orders wait for one another"
        ranks = waiting
    return events


def _seconds(action: Action, forward: Sequence[float], backward: Sequence[float]) -> float:
    match action.kind:
        case ActionKind.FORWARD:
            return forward[action.stage]
        case ActionKind.BACKWARD:
            return backward[action.stage]
        case ActionKind.BACKWARD_INPUT | ActionKind.BACKWARD_WEIGHT:
            return backward[action.stage] / 2
    return 0.0


def _ready(action: Action, done: dict[tuple[int, bool, int], float], num_stages: int) -> float | None:
    """When what it needs is there; None: not known yet."""
    if action.kind is ActionKind.FORWARD and action.stage > 0:
        return done.get((action.stage - 1, False, action.micro))
    if action.kind.starts_backward:
        needs = (
            (action.stage, False, action.micro) if action.stage == num_stages - 1 else (action.stage + 1, True, action.micro)
        )
        return done.get(needs)
    return 0.0
