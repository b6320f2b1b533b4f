"""What a tp rank takes of the arguments that enter a region: its heads of a bias, its experts of a routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oslo_engine.comm.collectives import Axis, copy_to
from oslo_engine.errors import PlanError
from oslo_engine.shards import Span


@dataclass(frozen=True)
class TakeItems:
    """This rank's items of a whole tensor, such as an additive attention bias by head.

    Args:
        name: of the argument, for errors.
        dim, size: the dimension of the items and how many the whole has. A tensor with one entry there is left alone.
        spans: the items of each rank.
        repeated: the dimension holds the items again and again ([batch * heads, ...]).
    """

    name: str
    dim: int
    size: int
    spans: tuple[tuple[Span, ...], ...]
    repeated: bool = False

    def __call__(self, axis: Axis, given: Mapping[str, Any], x: Tensor) -> Tensor:
        if x.shape[self.dim] == 1:
            return x
        if x.shape[self.dim] % self.size or (x.shape[self.dim] != self.size and not self.repeated):
            raise PlanError(
                f"the argument {self.name!r} has not the items that the policy says",
                expected=f"{self.size} in dimension {self.dim}",
                got=str(tuple(x.shape)),
            )
        x, dim = copy_to(x, axis), self.dim % x.ndim
        items = x.unflatten(dim, (-1, self.size))
        taken = torch.cat([items.narrow(dim + 1, start, stop - start) for start, stop in self.spans[axis.rank]], dim + 1)
        return taken.flatten(dim, dim + 1)


@dataclass(frozen=True)
class TakeExperts:
    """The routing as this rank's experts see it: their own numbers, and one past the last for experts of other ranks.

    Args:
        spans: the experts of each rank.
    """

    spans: tuple[Span, ...]

    def __call__(self, axis: Axis, given: Mapping[str, Any], index: Tensor) -> Tensor:
        start, stop = self.spans[axis.rank]
        return (index - start).masked_fill(self.elsewhere(axis, index), stop - start)

    def elsewhere(self, axis: Axis, index: Tensor) -> Tensor:
        start, stop = self.spans[axis.rank]
        return (index < start) | (index >= stop)


@dataclass(frozen=True)
class WeighExperts:
    """Routing weights, zero for experts of other ranks. ``index``: the argument with the routing."""

    experts: TakeExperts
    index: str

    def __call__(self, axis: Axis, given: Mapping[str, Any], weights: Tensor) -> Tensor:
        index = given[self.index]
        if index.shape != weights.shape:
            raise PlanError(
                "routing weights and expert numbers must have one shape where whole experts are dealt out",
                expected=str(tuple(index.shape)),
                got=str(tuple(weights.shape)),
                hint='use expert_split="inner"',
            )
        return weights.masked_fill(self.experts.elsewhere(axis, index), 0)
