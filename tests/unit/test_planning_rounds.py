"""Planning simulates a few rounds of a batch, and no messages: what it finds is what the whole batch does."""

from __future__ import annotations

import random

import pytest

from oslo_engine.pipeline.orders import ActionKind, compute_orders, num_stages, rank_of_stage, schedule_orders, takes
from oslo_engine.planning.rank_walk import idle_share, peak_bytes, simulated_count, steps_of
from oslo_engine.planning.stage_costs import Cost, StageCosts
from oslo_engine.planning.step_time import pipeline_bubble

SCHEDULES = ("1f1b", "interleaved", "zero-bubble-v")
COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
SIZES = [
    (schedule, pp, count)
    for schedule in SCHEDULES
    for pp in (2, 3, 5, 16)
    for count in (pp, 2 * pp + 1, 4 * pp, 5 * pp + 1, 6 * pp + 6, 7 * pp, 8 * pp + pp // 2, 12 * pp)
    if takes(schedule, pp, count)
]


@pytest.mark.parametrize(("schedule", "pp", "count"), [size for size in SIZES if size[2] <= 4 * size[1]])
def test_orders_without_messages_are_those_with_messages_without_these(schedule: str, pp: int, count: int) -> None:
    whole = schedule_orders(schedule, pp, count)
    only = tuple(tuple(action for action in actions if action.kind in COMPUTE) for actions in whole.actions)
    assert compute_orders(schedule, pp, count).actions == only
    assert compute_orders(schedule, pp, count).rank_of_stage == rank_of_stage(schedule, pp)


@pytest.mark.parametrize(("schedule", "pp", "count"), SIZES)
def test_some_rounds_fill_ranks_as_the_whole_batch_does_and_leave_the_same_bubble(schedule: str, pp: int, count: int) -> None:
    some = simulated_count(schedule, pp, count)
    assert some <= count
    assert count <= 2 * pp or some < 4 * pp
    draw = random.Random(pp)
    costs = []
    for _ in range(num_stages(schedule, pp)):
        kept = draw.randrange(100, 200)
        costs.append(StageCosts(Cost(kept + draw.randrange(50), kept), Cost(draw.randrange(50), -kept)))
    few, whole = compute_orders(schedule, pp, some), compute_orders(schedule, pp, count)
    steps = [[steps_of(actions) for actions in orders.actions] for orders in (few, whole)]
    assert peak_bytes(steps[0], costs) == peak_bytes(steps[1], costs)
    assert [each.in_flight for each in steps[0]] == [each.in_flight for each in steps[1]]
    stages = num_stages(schedule, pp)
    assert pipeline_bubble(schedule, pp, count) == pytest.approx(idle_share(whole, [1.0] * stages, [2.0] * stages), abs=0.01)


def test_peak_is_that_of_a_walk_by_hand() -> None:
    """1f1b, two ranks: the first has two micro-batches in flight, the second one."""
    costs = [StageCosts(Cost(12, 10), Cost(3, -10)), StageCosts(Cost(9, 5), Cost(30, -5))]
    steps = [steps_of(actions) for actions in compute_orders("1f1b", 2, 4).actions]
    assert [each.in_flight for each in steps] == [2, 1]
    assert peak_bytes(steps, costs) == [10 + max(12, 10 + 3), 5 + 30]
