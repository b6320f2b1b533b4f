"""Giving this rank's model the values of the tensors that it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.errors import CheckpointError
from oslo_engine.plan.plan import TensorPlan
from oslo_engine.shards import Shard


@dataclass(frozen=True)
class Slice:
    """One rank's part of a tensor that is cut."""

    shard: Shard
    tp_rank: int

    def cut(self, whole: Tensor) -> Tensor:
        return self.shard.apply(whole, self.tp_rank)

    def restore(self, kept: Tensor, whole: Tensor) -> None:
        """Write ``kept`` where ``cut`` took it from. Inverse: ``cut``."""
        at = 0
        for start, stop in self.shard.spans[self.tp_rank]:
            whole.narrow(self.shard.dim, start, stop - start).copy_(kept.narrow(self.shard.dim, at, stop - start))
            at += stop - start


def slice_of(tensor: TensorPlan, tp_rank: int) -> Slice | None:
    """The part of a tensor that a rank holds; None for the whole."""
    return None if tensor.shard is None else Slice(tensor.shard, tp_rank)


def find(model: nn.Module, tensor: TensorPlan) -> Tensor:
    """This rank's parameter or buffer; tied names share one.

    Raises:
        CheckpointError: the model does not hold it.
    """
    for alias in tensor.aliases:
        module, leaf = _owner(model, alias)
        found = (module._buffers if tensor.is_buffer else module._parameters).get(leaf)
        if found is not None:
            return found
    raise CheckpointError("the model lacks a tensor that its plan gives this rank", where=tensor.name, got=type(model).__name__)


def place(model: nn.Module, tensor: TensorPlan, value: Tensor, device: torch.device) -> None:
    """Put a value, already this rank's slice, under all names that a tensor has on this rank.

    Raises:
        CheckpointError: the model expects another shape.
    """
    old = find(model, tensor)
    if old.shape != value.shape:
        raise CheckpointError(
            "a value has not the shape of this rank's tensor",
            where=tensor.name,
            expected=tuple(old.shape),
            got=tuple(value.shape),
        )
    placed = value.detach().to(device)
    if not tensor.is_buffer:
        placed = nn.Parameter(placed, requires_grad=old.requires_grad)
    placed.__dict__.update(vars(old))
    for alias in tensor.aliases:
        module, leaf = _owner(model, alias)
        table: dict[str, Any] = module._buffers if tensor.is_buffer else module._parameters
        if table.get(leaf) is not None:
            table[leaf] = placed


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    while leaf not in module._parameters and isinstance(inner := module._modules.get("base_layer"), nn.Module):
        module = inner  # an adapter stands around it
    return module, leaf
