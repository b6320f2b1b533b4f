"""How long a step takes, roughly, to rank layouts by: computing, waiting in the pipeline, messages one after another.

An estimate by rule: matrix products at the speed the cluster is said to have, messages at the speed of the slowest link that
they cross, nothing overlapping. It says which layout is better, not how many seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from oslo_engine.pipeline.orders import compute_orders, num_stages
from oslo_engine.plan.plan import Plan
from oslo_engine.planning.candidates import Candidate
from oslo_engine.planning.question import Question
from oslo_engine.planning.rank_walk import idle_share, simulated_count
from oslo_engine.planning.traffic import Messages

_FORWARD_FLOPS = 2  # for a parameter and token: a product and a sum
_TERA = 1e12


class _Rank(Protocol):
    @property
    def numel(self) -> int: ...

    @property
    def messages(self) -> Mapping[tuple[str, str], Messages]: ...


@dataclass(frozen=True)
class StepTime:
    """computing: seconds of a step in which a rank computes. bubble: share of the pipeline's time in which ranks wait.
    seconds: of a step. limit: what takes most of them."""

    computing: float
    bubble: float
    seconds: float
    limit: str


def step_time(plan: Plan, question: Question, candidate: Candidate, ranks: Sequence[_Rank]) -> StepTime:
    """Of the slowest rank."""
    work = question.workload
    tokens = candidate.rows * candidate.micro_batches * (work.length + (work.target_length if _has_two(plan) else 0))
    passes = (3 + candidate.checkpointing) if work.trains else 1  # a backward computes twice as much as a forward
    parameters = max(rank.numel for rank in ranks)
    computing = _FORWARD_FLOPS * parameters * tokens * passes / (question.cluster.tflops * _TERA)
    if _has_two(plan):
        computing /= 2  # every token passes one of the two halves
    bubble = pipeline_bubble(candidate.schedule, candidate.pp, candidate.micro_batches) if work.trains else 0.0
    waiting = computing * bubble / (1 - bubble)
    sending: dict[str, float] = {}
    for rank in ranks:
        own: dict[str, float] = {}
        for (axis, kind), messages in rank.messages.items():
            carried = messages.bytes * _times_on_the_wire(kind, _group_size(axis, candidate))
            own[axis] = own.get(axis, 0.0) + carried / question.cluster.bytes_per_s(_reach(axis, candidate))
        sending |= {axis: max(sending.get(axis, 0.0), seconds) for axis, seconds in own.items()}
    kinds = {"compute": computing, "bubble": waiting, **{f"{axis} messages": seconds for axis, seconds in sending.items()}}
    return StepTime(computing, bubble, sum(kinds.values()), max(kinds, key=lambda kind: kinds[kind]))


@lru_cache(maxsize=512)
def pipeline_bubble(schedule: str, pp: int, micro_batches: int) -> float:
    """The share of a batch in which the ranks wait, with stages of equal size whose backward takes twice the forward."""
    if pp == 1:
        return 0.0
    simulated = simulated_count(schedule, pp, micro_batches)
    orders = compute_orders(schedule, pp, simulated)
    stages = num_stages(schedule, pp)
    idle = idle_share(orders, [1.0] * stages, [2.0] * stages)
    lost = idle / (1 - idle) * simulated  # waiting, counted in micro-batches of work
    return lost / (lost + micro_batches)


def _has_two(plan: Plan) -> bool:
    return len(plan.stacks) > 1


def _times_on_the_wire(kind: str, ranks: int) -> float:
    """How often a byte that is handed in leaves the rank, in ring algorithms."""
    share = (ranks - 1) / ranks
    return {"allreduce": 2 * share, "reduce_scatter": share, "allgather": ranks - 1.0, "recv": 0.0}.get(kind, 1.0)


def _group_size(axis: str, candidate: Candidate) -> int:
    return {"tp": candidate.tp, "dp": candidate.dp}.get(axis, 2)


def _reach(axis: str, candidate: Candidate) -> int:
    """How far apart in the numbering of ranks the members of a group lie, tp innermost and pp outermost."""
    tp, dp, pp = candidate.tp, candidate.dp, candidate.pp
    return {"tp": tp - 1, "dp": tp * (dp - 1), "pp": tp * dp, "shared": tp * dp * (pp - 1)}[axis]
