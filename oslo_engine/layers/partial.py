"""Parameters whose gradient on one tp rank is only a part of the whole.

Two kinds: uncut parameters used inside a region (norms of q and k), whose gradients all ranks add up; and parameters some
entries of which several ranks hold (a KV head replicated because there are more ranks than KV heads), whose shared entries are
added up. Both are read through an identity whose backward communicates, so every path of the gradient (accumulation,
checkpointing, ``autograd.grad``) gets the sum, and the parameter itself stays an ordinary leaf.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from oslo_engine.comm.collectives import Axis, copy_to
from oslo_engine.layers.specialize import specialize
from oslo_engine.shards import Shard

_MIXINS: dict[str, type] = {}


def sum_gradient(module: nn.Module, name: str, axis: Axis, shard: Shard | None = None, *, share: bool = False) -> nn.Module:
    """Read ``module.<name>`` so that its gradient is summed over the tp ranks (the shared entries only, where ``shard`` is
    given). With ``share`` every rank reads its share of the value, so that a sum over the ranks has it once.

    Communication: backward one all-reduce of the parameter's size (of its shared entries) on tp.
    """
    readers: dict[str, _Reader] = {**module.__dict__.get("_oslo_readers", {}), name: _Reader(axis, shard, share)}
    return specialize(module, _mixin(name), _oslo_readers=readers)


class _Reader:
    def __init__(self, axis: Axis, shard: Shard | None, share: bool) -> None:
        self.axis, self.shard, self.share = axis, shard, share

    def __call__(self, parameter: Tensor) -> Tensor:
        if isinstance(parameter, DTensor):  # divided by FSDP2, which wants to find its parameter; nothing computes with it
            return parameter
        if self.shard is None:
            whole = copy_to(parameter, self.axis)
            return whole / self.axis.size if self.share else whole
        if self.axis.size == 1 or not (torch.is_grad_enabled() and parameter.requires_grad):
            return parameter
        return _SumShared.apply(parameter, self.axis, self.shard)


def _mixin(name: str) -> type:
    """A class with one property that stands before the parameter of that name."""
    if name not in _MIXINS:

        def read(self: nn.Module) -> Tensor | None:
            parameter = self._parameters[name]
            return None if parameter is None else self.__dict__["_oslo_readers"][name](parameter)

        _MIXINS[name] = type(f"Summed_{name}", (), {name: property(read)})
    return _MIXINS[name]


class _SumShared(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, shard: Shard) -> Tensor:
        ctx.axis, ctx.shard = axis, shard
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        axis, shard = ctx.axis, ctx.shard
        grad = grad.clone(memory_format=torch.contiguous_format)
        shared = shard.shared_spans()
        starts: dict[tuple[int, int], int] = {}
        at = 0
        for start, stop in shard.spans[axis.rank]:
            starts[start, stop] = at
            at += stop - start
        buffer = grad.new_zeros([sum(b - a for a, b in shared) if d == shard.dim else n for d, n in enumerate(grad.shape)])
        at = 0
        places = []
        for start, stop in shared:
            if (start, stop) in starts:
                mine = grad.narrow(shard.dim, starts[start, stop], stop - start)
                buffer.narrow(shard.dim, at, stop - start).copy_(mine)
                places.append((mine, at, stop - start))
            at += stop - start
        dist.all_reduce(buffer, group=axis.group)
        for mine, at, length in places:
            mine.copy_(buffer.narrow(shard.dim, at, length))
        return grad, None, None
