"""Assigning block calls to pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_engine.errors import PlanError


def assign_stages(
    costs: Sequence[float], num_stages: int, *, last_cost: float = 0.0, per_rank: int = 1, what: str = "the model"
) -> tuple[int, ...]:
    """Cut a sequence of block calls into contiguous stages so that the dearest stage is as cheap as possible.

    Args:
        costs: one number per block call, in the order of the forward (parameters, as a measure of work).
        last_cost: what the last stage does besides its blocks (the head).
        per_rank: stages that each pipeline rank holds, for the error.

    Returns:
        The stage of each call: ascending, every stage has at least one.

    Raises:
        PlanError: there are fewer block calls than stages.
    """
    count = len(costs)
    if count < num_stages:
        raise PlanError(
            "there are fewer blocks than pipeline stages",
            where=what,
            expected=f"at least {num_stages} blocks",
            got=str(count),
            hint=f"use pp <= {count // per_rank}" if count >= per_rank else "use a schedule with one stage a rank",
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[s][i]: cheapest dearest stage when the first i calls make s stages; cut[s][i]: where the last of them starts.
    best = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stages in range(1, num_stages + 1):
        extra = last_cost if stages == num_stages else 0.0
        for end in range(stages, count - (num_stages - stages) + 1):  # the stages behind need a call each
            for start in range(end - 1, stages - 2, -1):
                last = sums[end] - sums[start] + extra
                if last > best[stages][end]:
                    break  # it only grows from here
                dearest = max(best[stages - 1][start], last)
                if dearest <= best[stages][end]:
                    best[stages][end], cut[stages][end] = dearest, start
    assigned = [0] * count
    end = count
    for stage in range(num_stages, 0, -1):
        start = cut[stage][end]
        assigned[start:end] = [stage - 1] * (end - start)
        end = start
    return tuple(assigned)
