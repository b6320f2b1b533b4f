"""Gradients of parameters that several stages hold, summed once for each batch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oslo_engine.comm.collectives import all_reduce_together
from oslo_engine.comm.mesh import Mesh
from oslo_engine.errors import PlanError
from oslo_engine.rewrite.state import ParallelState


class SharedGradients:
    """Sums the gradients of parameters that several pipeline ranks hold: ties, norms and projections outside the blocks.

    Communication: one group per set of holders, made at the start by all ranks in the same order.
    """

    def __init__(self, model: nn.Module, state: ParallelState) -> None:
        plan, mesh = state.plan, state.mesh
        self._model, self._state = model, state
        self._groups: list[Any] = []
        self._sets = list(dict.fromkeys(holders for tensor in plan.parameters if len(holders := plan.holders(tensor)) > 1))
        for holders in self._sets:
            self._groups.append(mesh.once(("holders", holders), functools.partial(_holder_group, mesh, holders)))

    def _group_of(self) -> dict[int, int]:
        """id of a parameter -> the number of its group. Asked anew for every batch: loading puts other objects in place."""
        found = {}
        for name, parameter in self._model.named_parameters():
            holders = self._holders(name)
            if len(holders) > 1:
                found[id(parameter)] = self._sets.index(holders)
        return found

    def _holders(self, name: str) -> tuple[int, ...]:
        """The pp ranks that hold a parameter; one that was added since, by hand, is where its block is.

        Raises:
            PlanError: it was added outside the blocks, where several stages may hold it.
        """
        plan = self._state.plan
        try:
            return plan.holders(plan.tensor(name))
        except KeyError:
            if any(name.startswith(f"{block}.") for block in plan.blocks):
                return ()
            raise PlanError(
                "a parameter was added outside the blocks of a pipeline, where several stages may hold it",
                where=name,
                expected="parameters that were there when the model was parallelized",
                hint="add it before parallelize",
            ) from None

    def sum(self, parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Args and returns: one gradient per parameter, None where no stage has one."""
        together: dict[int, list[int]] = {}
        group_of = self._group_of() if self._sets else {}
        for index, parameter in enumerate(parameters):
            group = group_of.get(id(parameter))
            if group is not None:
                together.setdefault(group, []).append(index)
        for group in sorted(together):
            self._sum_of_group(parameters, gradients, together[group], self._groups[group])
        return gradients

    def _sum_of_group(
        self, parameters: list[nn.Parameter], gradients: list[Tensor | None], indices: list[int], group: Any
    ) -> None:
        known = [gradients[index] for index in indices]
        whole = [torch.zeros_like(parameters[i]) if found is None else found for i, found in zip(indices, known, strict=True)]
        first = _local(whole[0])
        num_users = torch.tensor([float(found is not None) for found in known], dtype=first.dtype, device=first.device)
        all_reduce_together([num_users, *map(_local, whole)], group)
        # A zero would let weight decay at a parameter that nobody has used. Who has used it need not wait for the answer.
        unused = [count == 0 for count in num_users.tolist()] if any(found is None for found in known) else [False] * len(known)
        for index, total, nobody in zip(indices, whole, unused, strict=True):
            gradients[index] = None if nobody else total


def _local(gradient: Tensor) -> Tensor:
    """The memory of a gradient; FSDP2 gives the ranks of one dp rank the same part on every stage."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _holder_group(mesh: Mesh, holders: tuple[int, ...]) -> Any:
    """The process group of these pp ranks of every pipeline; None on a rank that is not among them."""
    mine = None
    for ranks in mesh.topology.groups("pp"):  # every rank creates every group, in the same order
        group = dist.new_group([ranks[holder] for holder in holders], timeout=mesh.timeout)
        if dist.get_rank() in ranks and mesh.at.pp_rank in holders:
            mine = group
    return mine
