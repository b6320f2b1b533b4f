"""Putting the parts together: groups, plan, rewritten model, pipeline program."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from oslo_engine.checkpoint.policy_hash import hash_of_policy
from oslo_engine.comm.fingerprint import fingerprint, fingerprints_of_ranks
from oslo_engine.comm.mesh import Mesh
from oslo_engine.comm.random import RandomStreams
from oslo_engine.errors import BatchError, OsloError, PlanError, PolicyError
from oslo_engine.pipeline.model_program import ModelProgram
from oslo_engine.pipeline.orders import rank_of_stage
from oslo_engine.policy.registry import find_policy, policies_by_model_type
from oslo_engine.policy.schema import Policy
from oslo_engine.rewrite.apply import apply_plan
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.tiny.subject import find_subject

Model = TypeVar("Model", bound=PreTrainedModel)


def assemble(
    model: Model,
    parallel_class: type,
    mesh: Mesh,
    *,
    policy: Policy | str | Path | None,
    schedule: str,
    micro_batch_size: int,
    sequence_parallel: bool,
    expert_split: str,
    seed: int | None,
) -> Model:
    """Split a whole model in place; see ``api.parallelize`` for the arguments. Collective."""
    check_micro_batch_size(micro_batch_size)
    tp, pp = mesh.topology.tp, mesh.topology.pp
    _check_same_weights(model, mesh)
    stages = rank_of_stage(schedule, pp)
    chosen = None if tp * pp == 1 and policy is None else _choose_policy(model, policy, mesh)
    layout = plan_model(
        model,
        chosen,
        mesh.topology,
        schedule=schedule,
        rank_of_stage=stages if pp > 1 else (0,),
        sequence_parallel=sequence_parallel,
        expert_split=expert_split,
    )
    plan = layout.plan
    streams = RandomStreams(_common_seed(seed, mesh), dp_rank=mesh.at.dp_rank, tp_rank=mesh.at.tp_rank, device=mesh.device)
    state = apply_plan(
        model,
        plan,
        mesh,
        streams,
        parallel_class=parallel_class,
        outer_modules=layout.outer_modules,
        defer_weight_gradients=schedule.startswith("zero-bubble") and plan.num_stages > 1,
    )
    state.micro_batch_size = micro_batch_size
    state.policy_hash = hash_of_policy(chosen)
    if layout.flows is not None:
        state.program = ModelProgram(model, state, layout.flows)
    return model


def _choose_policy(model: PreTrainedModel, policy: Policy | str | Path | None, mesh: Mesh) -> Policy:
    """The policy that was named or is installed; else one that rank 0 derives.

    Communication: where one is derived, one broadcast of it.
    """
    model_type = model.config.model_type
    if policy is not None or model_type in policies_by_model_type():
        return find_policy(policy, model_type)
    box: list[Any] = [None]
    if mesh.topology.world_size == 1 or dist.get_rank() == 0:
        box = [_derive_policy(model)]
    if mesh.topology.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], OsloError):
        raise box[0]
    file = f"{model_type}.yaml"
    warnings.warn(
        f"no policy serves {model_type!r}, so one was derived. Before you trust it: oslo-engine policy derive MODEL "
        f"--output {file}; oslo-engine verify MODEL --policy {file} --tp {mesh.topology.tp} --pp {mesh.topology.pp}",
        stacklevel=4,
    )
    return box[0]


def _derive_policy(model: PreTrainedModel) -> Policy | OsloError:
    """What goes wrong is returned, so that all ranks hear of it."""
    from oslo_engine.derive import derive

    try:
        return derive(find_subject(model)).policy
    except OsloError as error:
        return PolicyError(
            f"no policy serves model type {model.config.model_type!r}, and none could be derived: {error.what}",
            where=error.where,
            got=error.got,
            hint="pass policy=PATH to a YAML file of your own; docs/policies.md shows how to write one",
        )


def _check_same_weights(model: PreTrainedModel, mesh: Mesh) -> None:
    """
    Raises:
        PlanError: the ranks have different models, on every rank.

    Communication: one all-gather of 8 bytes over all ranks.
    """
    if mesh.topology.world_size == 1:
        return
    found = fingerprints_of_ranks(fingerprint(model.named_parameters()), None, mesh.device)
    if len(set(found)) > 1:
        raise PlanError(
            "the ranks were given models with different weights",
            where=f"{type(model).__name__} on ranks {sorted(found.index(each) for each in set(found))}",
            expected="the same model on every rank",
            got=f"{len(set(found))} different ones",
            hint="load a checkpoint, or call torch.manual_seed(...) with one number on every rank before building the model",
        )


def check_micro_batch_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise BatchError("the micro-batch size must be a positive integer", expected=">= 1", got=repr(size))


def _common_seed(seed: int | None, mesh: Mesh) -> int:
    value = torch.initial_seed() if seed is None else seed
    if mesh.topology.world_size == 1:
        return value
    # Through objects: seeds are unsigned 64-bit, and NCCL takes no CPU tensor.
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return int(box[0])
