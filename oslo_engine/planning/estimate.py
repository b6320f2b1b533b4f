"""What one layout costs: memory of every kind of rank, messages, bubble, time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from oslo_engine.footprint.resident import Resident
from oslo_engine.pipeline.orders import Action, ActionKind, Orders, forward_orders, schedule_orders
from oslo_engine.planning.candidates import Candidate
from oslo_engine.planning.model_plans import ModelPlans
from oslo_engine.planning.question import Question
from oslo_engine.planning.rank_walk import fill_rank
from oslo_engine.planning.stage_costs import stage_costs
from oslo_engine.planning.step_time import step_time
from oslo_engine.planning.traffic import Messages, rank_messages
from oslo_engine.topology import Topology


@dataclass(frozen=True)
class RankEstimate:
    """One kind of rank: all tp and dp ranks of a pp rank, the fullest of them.

    numel: entries of its parameters.
    activations: the most bytes in a step besides what is resident.
    in_flight: micro-batches between forward and backward.
    messages: of a step, by axis and kind.
    """

    pp_rank: int
    stages: tuple[int, ...]
    resident: Resident
    numel: int
    activations: int
    in_flight: int
    messages: Mapping[tuple[str, str], Messages]

    @property
    def total(self) -> int:
        return self.resident.total + self.activations


@dataclass(frozen=True)
class Estimate:
    """One layout.

    bubble: share of a step in which ranks wait for one another.
    seconds: of a step, at the speeds that the cluster was said to have. limit: what takes most of them, or of the memory.
    """

    candidate: Candidate
    ranks: tuple[RankEstimate, ...]
    bubble: float
    seconds: float
    limit: str

    @property
    def memory(self) -> int:
        """Bytes on the fullest rank."""
        return self.fullest.total

    @property
    def fullest(self) -> RankEstimate:
        return max(self.ranks, key=lambda rank: rank.total)


def resident_bytes(plans: ModelPlans, question: Question, candidate: Candidate) -> int:
    """What the fullest rank holds before it computes anything: quick to count, and often too much already. Raises as below."""
    held = plans.lay(candidate.tp, candidate.pp, candidate.schedule).held(question.workload)
    return max(each.resident.divided(candidate.dp, candidate.zero).total for each in held)


def estimate(plans: ModelPlans, question: Question, candidate: Candidate) -> Estimate:
    """
    Raises:
        PolicyError, PlanError, UnsupportedError: the engine could not run it, or its cost cannot be measured.
    """
    workload = dataclasses.replace(question.workload, rows=candidate.rows, checkpointing=candidate.checkpointing)
    laid = plans.lay(candidate.tp, candidate.pp, candidate.schedule)
    topology = Topology(tp=candidate.tp, pp=candidate.pp, dp=candidate.dp)
    plan = dataclasses.replace(laid.plan, topology=topology, schedule=candidate.schedule)
    blocks = plans.costs(candidate.tp, workload, sequence_parallel=candidate.sequence_parallel)
    costs = stage_costs(blocks, plan, laid.carried)
    orders = orders_of(candidate, trains=workload.trains)
    ranks = []
    for pp_rank, (actions, held) in enumerate(zip(orders.actions, laid.held(question.workload), strict=True)):
        filling = fill_rank(actions, costs)
        ranks.append(
            RankEstimate(
                pp_rank,
                plan.stages_of(pp_rank),
                held.resident.divided(candidate.dp, candidate.zero),
                held.numel,
                filling.peak_bytes,
                filling.in_flight,
                rank_messages(plan, held, costs, actions, pp_rank, candidate, workload),
            )
        )
    bubble, seconds, limit = step_time(plan, question, candidate, ranks)
    if max(rank.total for rank in ranks) > question.cluster.memory:
        limit = "memory"
    return Estimate(candidate, tuple(ranks), bubble, seconds, limit)


@lru_cache(maxsize=512)
def orders_of(candidate: Candidate, *, trains: bool) -> Orders:
    """What every pipeline rank does in a step; without a pipeline one micro-batch after the other."""
    count = candidate.micro_batches
    if candidate.pp > 1:
        make = schedule_orders if trains else forward_orders
        return make(candidate.schedule, candidate.pp, count)
    passes = (ActionKind.FORWARD, ActionKind.BACKWARD) if trains else (ActionKind.FORWARD,)
    return Orders((tuple(Action(0, kind, micro) for micro in range(count) for kind in passes),), (0,))
