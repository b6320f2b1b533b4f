"""What parallelize leaves on a model: its plan, its mesh and its random streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oslo_engine.comm.mesh import Mesh
from oslo_engine.comm.random import RandomStreams
from oslo_engine.comm.same_batch import BatchComparison
from oslo_engine.errors import PlanError
from oslo_engine.plan.plan import Plan, TensorPlan
from oslo_engine.rewrite.switch import Switch


@dataclass
class ParallelState:
    """Attached to a parallelized model as ``model._oslo``.

    plan: what every rank holds.
    mesh: this rank's place and groups.
    streams: its random streams.
    switch: who answers the calls of blocks while a pipeline stage runs.
    micro_batch_size: rows of a micro-batch.
    program: runs the stages of this rank (a ``pipeline.program.PipelineProgram``); None where pp == 1.
    batches_compared: how many batches the ranks have compared with one another.
    policy_hash: of what the policy said when the model was split; empty where there was none.
    unsplit: the whole model on meta, where something asked for its shapes.
    agreement: what makes the ranks go on together in the ``generate`` that runs just now.
    adapters: the tensors of the plan that belong to adapters, which came after it was split.
    adapter_configs: of the adapters that are in the plan.
    """

    plan: Plan
    mesh: Mesh
    streams: RandomStreams
    switch: Switch
    micro_batch_size: int = 1
    program: Any = None
    batches_compared: int = 0
    policy_hash: str = ""
    unsplit: Any = None
    agreement: Any = None
    adapters: tuple[TensorPlan, ...] = ()
    adapter_configs: tuple[Any, ...] = ()

    def set_adapters(self, tensors: tuple[TensorPlan, ...], configs: tuple[Any, ...]) -> None:
        """Let the plan have these tensors besides those of the model."""
        own = tuple(tensor for tensor in self.plan.tensors if tensor not in self.adapters)
        self.plan = dataclasses.replace(self.plan, tensors=(*own, *tensors))
        self.adapters, self.adapter_configs = tensors, configs

    @torch.compiler.disable
    def compare(self, batch: Mapping[str, Any]) -> BatchComparison:
        """Ask, with all ranks of this copy of the model, whether they have the same batch. See ``BatchComparison``."""
        self.batches_compared += 1
        ranks = self.mesh.calls.model_ranks
        return BatchComparison(batch, self.mesh.model, self.mesh.device, ranks=ranks, number=self.batches_compared)

    def held(self) -> list[TensorPlan]:
        """The tensors this rank holds, in the order of the model."""
        return list(self.plan.held_by(self.mesh.at.pp_rank))


def parallel_state(model: nn.Module) -> ParallelState:
    """The state of a parallelized model.

    Raises:
        PlanError: the model was not parallelized, or by a device map.
    """
    state = model.__dict__.get("_oslo")
    if state is None and "_oslo_placement" in model.__dict__:
        raise PlanError(
            "this is for models that are split over processes, and this model has a device map",
            got=type(model).__name__,
            hint="use it as a plain model: loss.backward(), torch.nn.utils.clip_grad_norm_, generate, save_pretrained",
        )
    if state is None:
        raise PlanError(
            "this model is not parallelized",
            got=type(model).__name__,
            hint="call oslo.parallelize(model, tp=..., pp=...) first",
        )
    return state


def split_model_in(model: nn.Module) -> PreTrainedModel | None:
    """The parallelized model in a wrapper such as DistributedDataParallel or PEFT's; None if there is none."""
    seen: nn.Module | None = model
    while seen is not None and "_oslo" not in seen.__dict__:
        inner = next((getattr(seen, name, None) for name in ("module", "base_model", "model") if name in seen._modules), None)
        seen = inner if isinstance(inner, nn.Module) else None
    assert seen is None or isinstance(seen, PreTrainedModel)
    return seen


def parallelized(model: nn.Module) -> PreTrainedModel:
    """``split_model_in`` of a model that must have one.

    Raises:
        PlanError: it has none.
    """
    found = split_model_in(model)
    if found is None:
        parallel_state(model)
    assert found is not None
    return found
