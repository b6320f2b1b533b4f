"""Assigning block calls to stages."""

from __future__ import annotations

import itertools
import random

import pytest

from oslo_engine.errors import PlanError
from oslo_engine.plan.stages import assign_stages


def test_equal_blocks_are_shared_out_equally() -> None:
    assert assign_stages([1] * 8, 4) == (0, 0, 1, 1, 2, 2, 3, 3)


def test_a_dear_head_relieves_the_last_stage() -> None:
    assert assign_stages([1] * 8, 2, last_cost=4) == (0, 0, 0, 0, 0, 0, 1, 1)


def test_every_stage_has_a_block_however_dear_the_head() -> None:
    assert assign_stages([1] * 4, 4, last_cost=100) == (0, 1, 2, 3)


def test_the_dearest_stage_is_as_cheap_as_can_be() -> None:
    random.seed(1)
    for _ in range(20):
        costs = [random.randint(1, 9) for _ in range(7)]
        stages = assign_stages(costs, 3, last_cost=2)
        dearest = max(sum(c for c, s in zip(costs, stages, strict=True) if s == stage) + 2 * (stage == 2) for stage in range(3))
        best = min(max(sum(costs[:a]), sum(costs[a:b]), sum(costs[b:]) + 2) for a, b in itertools.combinations(range(1, 7), 2))
        assert dearest == best


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"(?s)fewer blocks than pipeline stages.*GPT.*at least 4 blocks.*3"):
        assign_stages([1] * 3, 4, what="GPT")
