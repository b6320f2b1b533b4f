"""The plan of a model, without weights and without other processes."""

from __future__ import annotations

from oslo_engine.checkpoint.skeleton import meta_model
from oslo_engine.pipeline.orders import rank_of_stage
from oslo_engine.plan.plan import Plan
from oslo_engine.policy.schema import Policy
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.tiny.subject import Subject
from oslo_engine.topology import Topology


def plan_of(
    subject: Subject,
    policy: Policy,
    *,
    tp: int,
    pp: int,
    schedule: str = "1f1b",
    sequence_parallel: bool = False,
    expert_split: str = "inner",
) -> Plan:
    """What ``parallelize`` would do with the model on ``tp * pp`` ranks.

    Raises:
        PolicyError, PlanError: as ``parallelize``.
    """
    topology = Topology(tp=tp, pp=pp)
    return plan_model(
        subject.build(meta_model),
        policy,
        topology,
        schedule=schedule,
        rank_of_stage=rank_of_stage(schedule, pp) if pp > 1 else (0,),  # type: ignore[arg-type]
        sequence_parallel=sequence_parallel,
        expert_split=expert_split,
    ).plan
