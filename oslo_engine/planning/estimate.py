"""What one layout costs: memory of every kind of rank, messages, bubble, time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from oslo_engine.footprint.resident import Resident
from oslo_engine.pipeline.orders import Action, ActionKind, compute_orders, rank_of_stage
from oslo_engine.planning.candidates import Candidate
from oslo_engine.planning.model_plans import ModelPlans
from oslo_engine.planning.question import Question
from oslo_engine.planning.rank_walk import Steps, peak_bytes, simulated_count, steps_of
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

    bubble: share of a step in which ranks wait for one another. computing: seconds of a step in which a rank computes.
    seconds: of a step, at the speeds that the cluster was said to have. limit: what takes most of them, or of the memory.
    """

    candidate: Candidate
    ranks: tuple[RankEstimate, ...]
    bubble: float
    computing: float
    seconds: float
    limit: str

    @property
    def memory(self) -> int:
        """Bytes on the fullest rank."""
        return self.fullest.total

    @property
    def fullest(self) -> RankEstimate:
        return max(self.ranks, key=lambda rank: rank.total)


def fewest_bytes(plans: ModelPlans, question: Question, candidate: Candidate) -> int:
    """What the fullest rank holds at least, if everything can be divided evenly: known without a plan of the layout."""
    (whole,) = plans.lay(1, 1).held(question.workload)
    return whole.resident.divided(candidate.dp, candidate.zero).total // (candidate.tp * candidate.pp)


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
    steps = rank_steps(candidate.schedule, candidate.pp, candidate.micro_batches, workload.trains)
    activations = peak_bytes(steps, costs)
    ranks = []
    for pp_rank, held in enumerate(laid.held(question.workload)):
        ranks.append(
            RankEstimate(
                pp_rank,
                plan.stages_of(pp_rank),
                held.resident.divided(candidate.dp, candidate.zero),
                held.numel,
                activations[pp_rank],
                steps[pp_rank].in_flight,
                rank_messages(plan, held, costs, pp_rank, candidate, workload),
            )
        )
    time = step_time(plan, question, candidate, ranks)
    limit = "memory" if max(rank.total for rank in ranks) > question.cluster.memory else time.limit
    return Estimate(candidate, tuple(ranks), time.bubble, time.computing, time.seconds, limit)


@lru_cache(maxsize=512)
def rank_steps(schedule: str, pp: int, micro_batches: int, trains: bool) -> tuple[Steps, ...]:
    """What every pipeline rank computes in a step; without a pipeline one micro-batch after the other."""
    if not trains:
        stages = rank_of_stage(schedule, pp)
        orders = [
            [Action(stage, ActionKind.FORWARD, 0) for stage, holder in enumerate(stages) if holder == rank]
            for rank in range(pp)
        ]
    elif pp > 1:
        orders = [
            list(actions) for actions in compute_orders(schedule, pp, simulated_count(schedule, pp, micro_batches)).actions
        ]
    else:
        orders = [[Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0)]]
    return tuple(map(steps_of, orders))
