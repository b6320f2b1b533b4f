"""Rewriting the tensor-parallel regions of a model whose tensors are cut already."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oslo_engine.comm.mesh import Mesh
from oslo_engine.comm.random import RandomStreams
from oslo_engine.errors import PolicyError
from oslo_engine.layers.arguments import TakeExperts, TakeItems, WeighExperts
from oslo_engine.layers.norms import whole_norm
from oslo_engine.layers.partial import sum_gradient
from oslo_engine.layers.region import (
    Change,
    enter_at_columns,
    enter_region,
    inner_row_parallel,
    leave_at_scope,
    row_parallel,
)
from oslo_engine.plan.plan import Plan, RegionPlan


def set_attributes(model: PreTrainedModel, plan: Plan, tp_rank: int) -> None:
    """Give modules the head counts and sizes of this rank. A config among them becomes the module's own copy."""
    for region in plan.regions:
        for module_name, path, values in region.attributes:
            *parents, last = path.split(".")
            owner: Any = model.get_submodule(module_name)
            for parent in parents:
                setattr(owner, parent, copy.copy(getattr(owner, parent)))
                owner = getattr(owner, parent)
            value = values[tp_rank]
            setattr(owner, last, type(getattr(owner, last))(value) if isinstance(value, tuple) else value)


def rewrite_regions(model: PreTrainedModel, plan: Plan, mesh: Mesh, streams: RandomStreams) -> None:
    """Put the communication into every region, and the sums into the gradients of what is uncut there."""
    done: set[tuple[str, int]] = set()
    for region in plan.regions:
        scope = id(model.get_submodule(region.scope))
        if (region.name, scope) in done:  # one module under several names, shared by blocks
            continue
        done.add((region.name, scope))
        try:
            _rewrite(model, plan, region, mesh, streams)
        except KeyError as missing:
            raise PolicyError(
                f"region {region.name!r}: the scope's forward has no argument {missing}", where=f"{plan.policy}: {region.scope}"
            ) from None
    once = {name for region in plan.regions for name in region.once}
    for module, leaf, shard, name in _partial_parameters(model, plan, mesh.at.pp_rank):
        sum_gradient(module, leaf, mesh.tp, shard, share=name in once)


def _rewrite(model: PreTrainedModel, plan: Plan, region: RegionPlan, mesh: Mesh, streams: RandomStreams) -> None:
    scope, tp = model.get_submodule(region.scope), mesh.tp
    columns = [update_features(model.get_submodule(name)) for name in region.columns]
    rows = [update_features(model.get_submodule(name)) for name in region.rows]
    for name in region.inner:
        inner_row_parallel(update_features(model.get_submodule(name)), tp)
    for norm in region.norms:
        holders = norm.holders[tp.rank] if norm.holders else ()
        whole_norm(model.get_submodule(norm.module), tp, norm.size, norm.groups, norm.spans, holders)
    if region.leave == "rows":
        for row in rows:
            row_parallel(row, tp, streams, sequence_parallel=plan.sequence_parallel)
    else:
        leave_at_scope(scope, tp, streams)
    if region.enter == "columns":
        enter_at_columns(columns, rows, tp, streams)
    else:
        enter_region(scope, tp, streams, region.inputs, _changes(region, scope), sequence_parallel=plan.sequence_parallel)


def _changes(region: RegionPlan, scope: nn.Module) -> list[tuple[str, Change]]:
    changes: list[tuple[str, Change]] = [
        (argument.name, TakeItems(argument.name, argument.dim, argument.size, argument.spans, argument.repeated))
        for argument in region.arguments
    ]
    if region.experts is not None:
        take = TakeExperts(region.experts.spans)
        # The weights first: they are weighed by the numbers of all experts.
        changes += [(region.experts.weights, WeighExperts(take, region.experts.index)), (region.experts.index, take)]
    return changes


def _partial_parameters(model: PreTrainedModel, plan: Plan, pp_rank: int) -> Iterator[tuple[nn.Module, str, Any, str]]:
    """(module, attribute, shard if some entries are shared, name) of what a rank computes only a part of the gradient of."""
    seen: set[tuple[int, str]] = set()
    for tensor in plan.held_by(pp_rank):
        overlap = tensor.shard if tensor.shard is not None and tensor.shard.overlaps else None
        if not (tensor.partial or overlap is not None) or tensor.is_buffer:
            continue
        for alias in tensor.aliases:
            path, _, leaf = alias.rpartition(".")
            module = model.get_submodule(path)
            if (id(module), leaf) not in seen:
                seen.add((id(module), leaf))
                yield module, leaf, overlap, alias


def update_features(module: nn.Module) -> nn.Module:
    """Let the module's size attributes say what its weight now is."""
    weight = module.weight  # a parameter, or a meta tensor where another stage holds it
    assert isinstance(weight, Tensor)
    shape = tuple(weight.shape)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
    elif isinstance(module, Conv1D):
        module.nx, module.nf = shape
    return module
