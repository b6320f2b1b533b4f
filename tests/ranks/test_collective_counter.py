"""The counter of collectives names each kind once, whatever torch calls it, and sizes what a rank hands in."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from oslo_engine.comm.collectives import Axis, copy_to, gather_from, reduce_from
from oslo_engine.comm.counter import CollectiveCounter


def count_kinds() -> dict[str, list[int]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    three, whole = torch.ones(3), torch.ones(3 * world)
    with CollectiveCounter() as count:
        dist.all_reduce(three)
        functional.all_reduce(three, "sum", dist.group.WORLD).sum()
        dist.all_gather([torch.empty(3) for _ in range(world)], three)
        dist.all_gather_into_tensor(whole, three)
        functional.all_gather_tensor(three, 0, dist.group.WORLD).sum()
        dist.reduce_scatter_tensor(three, whole)
        dist.broadcast(whole.double(), 0)
        if rank == 0:
            dist.send(three, 1)
        if rank == 1:
            dist.recv(three, 0)
        dist.barrier()
    dist.all_reduce(three)
    assert count.num_calls == sum(calls for calls, _ in count.calls.values())
    assert count.num_bytes == sum(size for _, size in count.calls.values())
    return count.calls


def test_each_kind_is_counted_and_sized(rank_pool):
    common = {"allreduce": [2, 24], "allgather": [3, 36], "reduce_scatter": [1, 24], "broadcast": [1, 48]}
    assert rank_pool(2).run(count_kinds) == [common | {"send": [1, 12]}, common | {"recv": [1, 12]}]


def count_backward() -> list[dict[str, list[int]]]:
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    x = torch.ones(5, dtype=torch.bfloat16, requires_grad=True)
    with CollectiveCounter() as forward:
        y = gather_from(reduce_from(copy_to(x, axis) * 2, axis), axis, 0, (5, 5))
    with CollectiveCounter() as backward:
        y.sum().backward()
    return [forward.calls, backward.calls]


def test_forward_and_backward_are_counted_where_they_run(rank_pool):
    for forward, backward in rank_pool(2).run(count_backward):
        assert forward == {"allreduce": [1, 10], "allgather": [1, 10]}
        assert backward == {"allreduce": [1, 10]}
