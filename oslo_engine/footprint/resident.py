"""What ranks keep through a whole step: weights, buffers, gradients, optimizer state. Counted from the plan, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from oslo_engine.footprint.workload import Workload
from oslo_engine.plan.plan import Plan


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

    def divided(self, dp: int, zero: int) -> Resident:
        """Under DeepSpeed's ZeRO over dp ranks: stage 1 divides the optimizer state, 2 also gradients, 3 also weights.

        Parts are padded to equal size, so these figures are a few bytes from the truth.
        """
        return replace(
            self,
            weights=_part(self.weights, dp, zero >= 3),
            gradients=_part(self.gradients, dp, zero >= 2),
            optimizer=_part(self.optimizer, dp, zero >= 1),
        )


@dataclass(frozen=True)
class Parameter:
    """Of a rank: its bytes there, its dtype, the pp ranks that hold it."""

    bytes: int
    dtype: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """What tp rank 0 of a pp rank holds. numel: entries of its parameters."""

    resident: Resident
    numel: int
    parameters: tuple[Parameter, ...]


@dataclass
class _Sum:
    weights: int = 0
    buffers: int = 0
    optimizer: int = 0
    numel: int = 0
    parameters: list[Parameter] = field(default_factory=list)


def held_by_ranks(plan: Plan, workload: Workload) -> tuple[Held, ...]:
    """By pp rank; of the tp ranks the first, which none exceeds.

    Args:
        workload: says whether there are gradients and an optimizer; every parameter is taken to be trained.
    """
    sums = [_Sum() for _ in range(plan.topology.pp)]
    for tensor in plan.tensors:
        shape, dtype = tensor.local_shape(0), getattr(torch, tensor.dtype)
        numel, holders = math.prod(shape), plan.holders(tensor)
        for holder in holders:
            own = sums[holder]
            if tensor.is_buffer:
                own.buffers += numel * dtype.itemsize
                continue
            own.weights += numel * dtype.itemsize
            own.numel += numel
            own.optimizer += workload.optimizer_bytes(shape, dtype.itemsize)
            own.parameters.append(Parameter(numel * dtype.itemsize, tensor.dtype, holders))
    return tuple(
        Held(
            Resident(own.weights, own.buffers, own.weights if workload.trains else 0, own.optimizer),
            own.numel,
            tuple(own.parameters),
        )
        for own in sums
    )


def _part(size: int, dp: int, divided: bool) -> int:
    return -(-size // dp) if divided else size
