"""From a model and sizes to a plan: match the policy, record the data flow, assign stages, say who holds what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from oslo_engine.plan.build import build_plan
from oslo_engine.plan.match import Match, match_policy
from oslo_engine.plan.plan import Plan
from oslo_engine.plan.stages import assign_stages
from oslo_engine.policy.schema import Policy
from oslo_engine.rewrite.flows import FlowBook
from oslo_engine.rewrite.skeleton import skeleton
from oslo_engine.topology import Topology


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
) -> Layout:
    """Plan a model for all ranks of a topology; no process group, no weights.

    Args:
        model: real or on ``meta``; left as it is.
        policy: None only where tp and pp are 1.
        rank_of_stage: the pp rank that runs each stage; their number is the number of stages.

    Raises:
        PolicyError, PlanError: see ``match_policy`` and ``assign_stages``.
    """
    match = Match() if policy is None else match_policy(model, policy, topology.tp)
    blocks = [block for stack in match.stacks.values() for block in stack]
    num_stages = len(rank_of_stage)

    def build(calls: Sequence[tuple[str, int]], stage_of_call: Sequence[int], live_tensors: Sequence[Collection[str]]) -> Plan:
        return build_plan(
            model,
            policy.name if policy else "none",
            match,
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
    flows = FlowBook(skeleton(model, dtype=model.dtype), blocks)
    calls = flows.calls()
    head = model.get_output_embeddings()
    stage_of_call = assign_stages(
        [_numel(model.get_submodule(name)) for name, _ in calls],
        num_stages,
        last_cost=0 if head is None else _numel(head),
        what=type(model).__name__,
    )
    flows.place(dict(zip(calls, stage_of_call, strict=True)), num_stages)
    outer = dict.fromkeys((*_outer_modules(model, blocks), *flows.shared_random_modules()))
    return Layout(build(calls, stage_of_call, flows.live_tensors()), tuple(outer), flows)


def _outer_modules(model: PreTrainedModel, blocks: list[str]) -> tuple[str, ...]:
    inside = {id(module) for block in blocks for module in model.get_submodule(block).modules()}
    return tuple(
        name
        for name, module in model.named_modules()
        if name and id(module) not in inside and any(True for _ in module.parameters(recurse=False))
    )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
