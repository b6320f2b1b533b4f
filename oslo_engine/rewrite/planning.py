"""From a model and sizes to a plan: match the policy, record the data flow, assign stages, say who holds what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedModel

from oslo_engine.errors import PlanError, UnsupportedError
from oslo_engine.plan.build import build_plan
from oslo_engine.plan.plan import Plan
from oslo_engine.plan.stages import assign_stages
from oslo_engine.plan.survey import Prepared, prepare
from oslo_engine.policy.schema import Policy
from oslo_engine.rewrite.flows import FlowBook
from oslo_engine.rewrite.skeleton import skeleton
from oslo_engine.topology import Topology

EXPERT_SPLITS = ("inner", "expert")


@dataclass(frozen=True)
class Layout:
    """A plan, and what running it needs besides.

    outer_modules: modules outside the blocks that own parameters; a stage may answer for them.
    flows: what crosses the cuts, by kind of call; None without a pipeline.
    """

    plan: Plan
    outer_modules: tuple[str, ...] = ()
    flows: FlowBook | None = None


def plan_model(
    model: PreTrainedModel,
    policy: Policy | None,
    topology: Topology,
    *,
    schedule: str = "1f1b",
    rank_of_stage: tuple[int, ...] = (0,),
    sequence_parallel: bool = False,
    expert_split: str = "inner",
    flows: FlowBook | None = None,
    prepared: Prepared | None = None,
) -> Layout:
    """Plan a model for all ranks of a topology; no process group, no weights.

    Args:
        model: real or on ``meta``; left as it is.
        policy: None only where tp and pp are 1.
        rank_of_stage: the pp rank that runs each stage; their number is the number of stages.
        expert_split: how mixtures of experts are divided, see ``match_policy``.
        flows: recordings of this model from an earlier layout, whose cuts are forgotten; by default it is recorded.
        prepared: of this model, policy, tp and split of experts, from an earlier layout; by default it is made.

    Raises:
        PolicyError, PlanError: see ``match_policy`` and ``assign_stages``.
    """
    _check_options(policy, model.config, topology, sequence_parallel, expert_split)
    if prepared is None:
        prepared = prepare(model, policy, topology.tp, expert_split=expert_split)
    blocks = [block for stack in prepared.match.stacks.values() for block in stack]
    num_stages = len(rank_of_stage)

    def build(calls: Sequence[tuple[str, int]], stage_of_call: Sequence[int], live_tensors: Sequence[Collection[str]]) -> Plan:
        return build_plan(
            type(model).__name__,
            policy.name if policy else "none",
            prepared,
            topology,
            schedule=schedule,
            sequence_parallel=sequence_parallel,
            rank_of_stage=rank_of_stage,
            calls=calls,
            stage_of_call=stage_of_call,
            live_tensors=live_tensors,
        )

    if num_stages == 1:
        return Layout(build([(block, 0) for block in blocks], [0] * len(blocks), [[]]))
    flows = flows or FlowBook(skeleton(model, dtype=model.dtype), blocks)
    calls = flows.calls()
    stage_of_call = assign_stages(
        [prepared.survey.sizes[name] for name, _ in calls],
        num_stages,
        last_cost=prepared.survey.head_size,
        per_rank=num_stages // topology.pp,
        what=type(model).__name__,
    )
    flows.place(dict(zip(calls, stage_of_call, strict=True)), num_stages)
    outer = dict.fromkeys((*prepared.survey.outer_modules, *flows.shared_random_modules()))
    return Layout(build(calls, stage_of_call, flows.live_tensors()), tuple(outer), flows)


def _check_options(policy: Policy | None, config: Any, topology: Topology, sequence_parallel: bool, expert_split: str) -> None:
    if expert_split not in EXPERT_SPLITS:
        raise PlanError(
            "no such split of experts", where="expert_split", expected=" or ".join(EXPERT_SPLITS), got=repr(expert_split)
        )
    if policy is not None and policy.whole_batch and topology.pp > 1:
        raise UnsupportedError(
            "this architecture does not compute the same in micro-batches, so it cannot run in a pipeline",
            where=policy.origin,
            got=policy.whole_batch,
            hint="use tp",
        )
    if policy is not None and topology.tp > 1:
        _check_refusals(policy, config)
    if sequence_parallel and topology.tp > 1 and policy is not None and not policy.sequence_parallel:
        raise PlanError(
            "this architecture is not known to work with sequence parallelism",
            where=policy.origin or policy.name,
            expected="sequence_parallel: true in its policy",
            hint="leave sequence_parallel out",
        )


def _check_refusals(policy: Policy, config: Any) -> None:
    for attribute, why in policy.refuse.items():
        if getattr(config, attribute, None):
            what = f"a model with {attribute} cannot be cut by tensor parallelism"
            raise UnsupportedError(what, where=policy.origin, expected=f"{attribute} not set", got=why)
    for package, why in policy.not_with.items():
        if find_spec(package) is not None:
            raise UnsupportedError(
                f"this architecture cannot be cut while {package} is installed", where=policy.origin, got=why
            )
