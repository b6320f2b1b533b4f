"""Collectives with a gradient, over one axis of the mesh.

``f`` and ``g`` are the conjugate pair of Megatron-LM (arXiv 1909.08053, section 3): a replicated value enters a sharded region
through ``copy_to`` (f) and the partial results leave it through ``reduce_from`` (g). On an axis of size 1 every function
returns its input and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Axis:
    """This rank's view of one mesh axis: ``0 <= rank < size``; ``group`` is None where size is 1."""

    name: str
    size: int = 1
    rank: int = 0
    group: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self  # process groups cannot be copied


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Hand a replicated tensor to a region where each rank computes a part.

    Communication: forward none; backward one all-reduce of ``x``'s size on ``axis``. Inverse: ``reduce_from``.
    """
    return x if axis.size == 1 or not (torch.is_grad_enabled() and x.requires_grad) else _Copy.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum the partial results of a sharded region into a replicated tensor; ``x`` itself is used up.

    Communication: forward one all-reduce of ``x``'s size on ``axis``; backward none. Inverse: ``copy_to``.
    """
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_from(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Concatenate the ranks' slices: ``[.., sizes[rank], ..] -> [.., sum(sizes), ..]`` along ``dim``. Sizes may differ.

    The backward takes this rank's slice: every rank is assumed to compute the same thing from the whole.

    Communication: forward one all-gather of ``max(sizes)`` on ``axis``; backward none.
    """
    return x if axis.size == 1 else _Gather.apply(x, axis, dim, tuple(sizes))


def split_to(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Keep this rank's equal part of a replicated tensor: ``[.., n, ..] -> [.., n / size, ..]`` along ``dim``.

    Communication: forward none; backward one all-gather of ``x``'s size on ``axis``. Inverse: ``gather_from``.
    """
    return x if axis.size == 1 else _Split.apply(x, axis, dim)


def gather_to(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Collect a tensor split along ``dim`` for a region where each rank computes a part: ``copy_to`` of a split activation.

    Communication: forward one all-gather, backward one reduce-scatter of the whole on ``axis``. Inverse:
        ``reduce_scatter_from``.
    Source: Korthikanti et al. (arXiv 2205.05198), section 4.2.
    """
    return x if axis.size == 1 else _GatherTo.apply(x, axis, dim)


def reduce_scatter_from(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum the partial results of a region and keep this rank's part along ``dim``: ``reduce_from`` into a split activation.

    Communication: forward one reduce-scatter, backward one all-gather of the whole on ``axis``. Inverse: ``gather_to``.
    """
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """Elementwise maximum over the axis; no gradient. Communication: one all-reduce of ``x``'s size."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    if axis.size > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=axis.group)
    return x


def all_reduce_sum(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis into a new tensor; no gradient. Communication: one all-reduce of ``x``'s size."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    if axis.size > 1:
        dist.all_reduce(x, group=axis.group)
    return x


def all_reduce_together(tensors: Sequence[Tensor], group: Any, *, bucket_bytes: int = 32 << 20) -> None:
    """Sum tensors over a group in place, packed into buckets of one dtype so that many small ones cost one message.

    Communication: one all-reduce per bucket. Every rank of the group must pass the same shapes in the same order.
    """
    buckets: list[list[Tensor]] = []
    open_bucket: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        bucket, filled = open_bucket.get(tensor.dtype, ([], 0))
        if not bucket or filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        open_bucket[tensor.dtype] = bucket, filled + size
    for bucket in buckets:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def gather_at_first(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor | None:
    """``all_gather`` to the first rank of the axis only; None on the others.

    Communication: one gather of ``max(sizes)``; nothing travels to the other ranks.
    """
    if axis.size == 1:
        return x
    wire = _padded_rows(x, dim, max(sizes))
    parts = [torch.empty_like(wire) for _ in range(axis.size)] if axis.rank == 0 else None
    dist.gather(wire, parts, group=axis.group, group_dst=0)
    return None if parts is None else _joined(parts, dim, sizes)


def all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """``gather_from`` without a gradient; ranks with fewer rows are padded on the wire."""
    if axis.size == 1:
        return x
    wire = _padded_rows(x, dim, max(sizes))
    parts = [torch.empty_like(wire) for _ in range(axis.size)]
    dist.all_gather(parts, wire, group=axis.group)
    return _joined(parts, dim, sizes)


def _padded_rows(x: Tensor, dim: int, most: int) -> Tensor:
    """``dim`` first, with ``most`` entries, in one piece of memory."""
    x = x.detach().movedim(dim, 0)
    if x.shape[0] == most:
        return x.contiguous()
    wire = x.new_zeros(most, *x.shape[1:])
    wire[: x.shape[0]] = x
    return wire


def _joined(parts: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> Tensor:
    return torch.cat([part[:size].movedim(0, dim) for part, size in zip(parts, sizes, strict=True)], dim)


def _reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    chunks = [chunk.contiguous() for chunk in x.detach().chunk(axis.size, dim)]
    part = torch.empty_like(chunks[0])
    dist.reduce_scatter(part, chunks, group=axis.group)
    return part


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad, ctx.axis), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        # In place: what comes here is the result of a product that nobody else reads. Autograd would raise if somebody did.
        if torch.compiler.is_compiling() or x._is_view() or not x.is_contiguous():
            return all_reduce_sum(x, axis)
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.dim, ctx.start, ctx.length = dim, sum(sizes[: axis.rank]), sizes[axis.rank]
        return all_gather(x, axis, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.narrow(ctx.dim, ctx.start, ctx.length), None, None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.chunk(axis.size, dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim, [grad.shape[ctx.dim]] * ctx.axis.size), None, None


class _GatherTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim, [x.shape[dim]] * axis.size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim, [grad.shape[ctx.dim]] * ctx.axis.size), None, None
