"""Walking a rank's schedule: how full it gets, how many micro-batches are in flight, how long it idles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oslo_engine.pipeline.orders import Action, ActionKind, Orders
from oslo_engine.planning.stage_costs import StageCosts


@dataclass(frozen=True)
class Filling:
    """Of one rank in one batch: the most bytes of activations, and the most (stage, micro-batch) pairs in flight."""

    peak_bytes: int
    in_flight: int


def fill_rank(actions: Sequence[Action], costs: Sequence[StageCosts]) -> Filling:
    """The activations of a rank over a batch.

    A split backward (zero bubble) frees what it kept only with the weight gradients.

    Args:
        actions: of the rank.
        costs: of every stage.
    """
    splits = any(action.kind is ActionKind.BACKWARD_WEIGHT for action in actions)
    level = peak = flying = most = 0
    for action in actions:
        cost = costs[action.stage]
        if action.kind is ActionKind.FORWARD:
            peak = max(peak, level + cost.forward.peak)
            level += cost.forward.kept
            flying += 1
            most = max(most, flying)
        elif action.kind.starts_backward:
            peak = max(peak, level + cost.backward.peak)
            flying -= 1
            if not splits or action.kind is ActionKind.BACKWARD:
                level -= cost.forward.kept
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            level -= cost.forward.kept
    return Filling(peak, most)


def idle_share(orders: Orders, forward: Sequence[float], backward: Sequence[float]) -> float:
    """The bubble: the share of a batch's time in which the ranks wait, all together, if messages took no time.

    Args:
        orders: of all ranks.
        forward, backward: seconds of each stage for a micro-batch; a split backward is halved.
    """
    position = [0] * len(orders.actions)
    clock = [0.0] * len(orders.actions)
    busy = 0.0
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
                    clock[rank] = max(clock[rank], ready) + took
                    busy += took
                    if action.kind is ActionKind.FORWARD or action.kind.starts_backward:
                        done[action.stage, action.kind is not ActionKind.FORWARD, action.micro] = clock[rank]
                position[rank] += 1
                moved = True
            if position[rank] < len(actions):
                waiting.append(rank)
        assert moved, "the orders wait for one another"
        ranks = waiting
    whole = max(clock) * len(clock)
    return 1 - busy / whole if whole else 0.0


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
