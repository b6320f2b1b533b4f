"""What a rank keeps through a whole step: weights, buffers, gradients, optimizer state. Counted from the plan, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from oslo_engine.footprint.workload import Workload
from oslo_engine.plan.plan import Plan, TensorPlan


@dataclass(frozen=True)
class Resident:
    """Bytes of one rank, by kind."""

    weights: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.buffers + self.gradients + self.optimizer


def resident(plan: Plan, pp_rank: int, tp_rank: int, workload: Workload, *, zero: int = 0) -> Resident:
    """What the rank at this place holds.

    Args:
        workload: says whether there are gradients and an optimizer; every parameter is taken to be trained.
        zero: stage of DeepSpeed's ZeRO over the data-parallel ranks: 1 divides the optimizer state, 2 also the gradients, 3
            also the weights. Parts are padded to equal size, so these figures are a few bytes from the truth; those of stage
            0 are exact.
    """
    weights = buffers = gradients = optimizer = 0
    for tensor in plan.held_by(pp_rank):
        shape, itemsize = tensor.local_shape(tp_rank), _itemsize(tensor)
        size = math.prod(shape) * itemsize
        if tensor.is_buffer:
            buffers += size
            continue
        weights += size
        if workload.trains:
            gradients += size
            optimizer += workload.optimizer_bytes(shape, itemsize)
    dp = plan.topology.dp
    return Resident(
        weights=_part(weights, dp, zero >= 3),
        buffers=buffers,
        gradients=_part(gradients, dp, zero >= 2),
        optimizer=_part(optimizer, dp, zero >= 1),
    )


def _part(size: int, dp: int, divided: bool) -> int:
    return -(-size // dp) if divided else size


def _itemsize(tensor: TensorPlan) -> int:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype.itemsize
