"""Carrying out a plan on this rank's model. The only code that changes a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oslo_engine.comm.mesh import Mesh
from oslo_engine.comm.random import RandomStreams
from oslo_engine.layers.deferred import DeferredConv1D, DeferredLinear
from oslo_engine.layers.region import sequence_block
from oslo_engine.layers.specialize import original_class, remove_specialization, specialize
from oslo_engine.layers.vocabulary import vocab_parallel_embedding, vocab_parallel_head
from oslo_engine.plan.plan import Plan, TensorPlan
from oslo_engine.rewrite.optimizers import mark_replaced, watch_optimizers_of
from oslo_engine.rewrite.regions import rewrite_regions, set_attributes, update_features
from oslo_engine.rewrite.state import ParallelState
from oslo_engine.rewrite.switch import Switch, make_switchable


def apply_plan(
    model: PreTrainedModel,
    plan: Plan,
    mesh: Mesh,
    streams: RandomStreams,
    *,
    parallel_class: type,
    outer_modules: Collection[str] = (),
    defer_weight_gradients: bool = False,
) -> ParallelState:
    """Rewrite ``model`` in place into what this rank holds and runs.

    Args:
        model: whole, real or on ``meta`` (a meta parameter stays on meta, with this rank's shape).
        parallel_class: the subclass of the model's class that knows how to run split.
        outer_modules: modules outside the blocks that some stage does not need.
        defer_weight_gradients: whether the schedule computes weight gradients apart (zero bubble).

    Returns:
        The state that it attached to the model.
    """
    tp_rank = mesh.at.tp_rank
    switch = Switch()
    set_attributes(model, plan, tp_rank)
    _place_tensors(model, plan, mesh)
    if plan.topology.tp > 1:
        rewrite_regions(model, plan, mesh, streams)
        for module, sizes in _once(model, plan.embeddings):
            vocab_parallel_embedding(module, mesh.tp, sizes)
        for module, sizes in _once(model, plan.heads):
            vocab_parallel_head(update_features(module), mesh.tp, sizes)
    if defer_weight_gradients:
        # Row layers defer by themselves.
        rows = {row for region in plan.regions for row in (*region.rows, *region.inner) if region.leave == "rows"}
        for block in plan.blocks:
            for name, module in model.get_submodule(block).named_modules(prefix=block):
                if original_class(module) in (nn.Linear, Conv1D) and name not in rows:
                    specialize(module, DeferredLinear if isinstance(module, nn.Linear) else DeferredConv1D)
    if plan.num_stages > 1:
        for name in dict.fromkeys((*plan.blocks, *outer_modules)):
            make_switchable(model.get_submodule(name), name, switch)
    if plan.sequence_parallel and plan.topology.tp > 1:
        for _, blocks in plan.stacks:
            for block in blocks:
                sequence_block(model.get_submodule(block), mesh.tp, streams, first=block == blocks[0], last=block == blocks[-1])
    for module in model.modules():
        if module is not model and isinstance(module, PreTrainedModel) and not any(True for _ in module.parameters()):
            specialize(module, _Elsewhere, _oslo_device=mesh.device)
    state = ParallelState(plan, mesh, streams, switch)
    model.__class__ = parallel_class
    model.__dict__["_oslo"] = state
    if plan.topology.tp * plan.topology.pp > 1:
        watch_optimizers_of(model)
    return state


@dataclass(frozen=True)
class Change:
    """A behaviour that a module is given: see ``layers.specialize``."""

    name: str
    mixin: type
    fields: dict[str, Any]


def specialize_modules(model: nn.Module, changes: Sequence[Change]) -> None:
    """Give modules another behaviour, each under what it has already. Inverse: ``restore_modules``."""
    for change in changes:
        specialize(model.get_submodule(change.name), change.mixin, **change.fields)


def restore_modules(model: nn.Module, names: Sequence[str], mixins: tuple[type, ...], prefix: str) -> None:
    """Take the behaviours of ``mixins`` from modules again, with the fields whose names begin with ``prefix``."""
    for name in reversed(names):
        module = model.get_submodule(name)
        remove_specialization(module, mixins)
        for key in [key for key in module.__dict__ if key.startswith(prefix)]:
            del module.__dict__[key]


class _Elsewhere:
    """A model within the model whose parameters other ranks hold: code asks such for its device and type."""

    _oslo_device: torch.device

    @property
    def device(self) -> torch.device:
        return self._oslo_device

    @property
    def dtype(self) -> torch.dtype:
        return self.config.dtype or torch.get_default_dtype()  # type: ignore[attr-defined, no-any-return]


def _once(model: nn.Module, named: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[nn.Module, tuple[int, ...]]]:
    """The modules of these names, each once: one module may stand under several names."""
    return list({id(module): (module, sizes) for name, sizes in named for module in [model.get_submodule(name)]}.values())


def _place_tensors(model: PreTrainedModel, plan: Plan, mesh: Mesh) -> None:
    """Cut what this rank holds; what it does not hold leaves ``parameters()`` and the state dict.

    A meta tensor stays behind under the same attribute, since stubs and size checks read shapes. A model that is not split
    keeps its parameters, and with them the optimizers that were built around them.
    """
    split = plan.topology.tp * plan.topology.pp > 1
    owners: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    for tensor in plan.tensors:
        held = mesh.at.pp_rank in plan.holders(tensor)
        local: Tensor | None = None
        for alias in tensor.aliases:
            path, _, leaf = alias.rpartition(".")
            module = owners[path]
            table: dict[str, Any] = module._buffers if tensor.is_buffer else module._parameters
            if local is None:
                whole = table.get(leaf)
                local = _local(whole, tensor, mesh, held) if split or tensor.is_buffer else _moved(whole, mesh)
                if isinstance(whole, nn.Parameter) and local is not whole:
                    mark_replaced(whole)
            if held:
                table[leaf] = local
            else:
                table.pop(leaf, None)
                module.__dict__[leaf] = local


def _local(whole: Tensor | None, tensor: TensorPlan, mesh: Mesh, held: bool) -> Tensor:
    assert whole is not None, tensor.name
    shape = tensor.local_shape(mesh.at.tp_rank)
    with torch.no_grad():
        if not held or whole.is_meta:
            local = torch.empty(shape, dtype=whole.dtype, device="meta")
        elif tensor.shard is None:
            local = whole.detach().to(mesh.device)
        else:
            local = tensor.shard.apply(whole.detach(), mesh.at.tp_rank).to(mesh.device)
    if tensor.is_buffer or not held:
        return local
    parameter = nn.Parameter(local, requires_grad=whole.requires_grad)
    parameter.__dict__.update({key: value for key, value in vars(whole).items() if key not in ("_is_hf_initialized",)})
    return parameter


def _moved(whole: Any, mesh: Mesh) -> nn.Parameter:
    """A parameter that stays what it is, on this rank's device."""
    if not whole.is_meta:
        whole.data = whole.data.to(mesh.device)
        if whole.grad is not None:
            whole.grad = whole.grad.to(mesh.device)
    vars(whole).pop("_is_hf_initialized", None)
    parameter: nn.Parameter = whole
    return parameter
