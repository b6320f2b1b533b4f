"""The messages that one rank hands to its neighbours in a training step, as ``comm.counter`` would count them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from oslo_engine.footprint.profile import SentValue
from oslo_engine.footprint.resident import Held, Parameter
from oslo_engine.footprint.workload import Workload
from oslo_engine.plan.plan import Plan
from oslo_engine.planning.candidates import Candidate
from oslo_engine.planning.stage_costs import StageCosts

_BUCKET_BYTES = 32 << 20  # of ``all_reduce_together``
_NUMBER = 8  # bytes of a number in a header or a loss message
_LOSS_NUMBERS, _AGREED_NUMBERS, _COMPARED_NUMBERS = 5, 3, 3


@dataclass(frozen=True)
class Messages:
    """How often, and how many bytes this rank hands in (for "recv": takes out)."""

    calls: int
    bytes: int


class _Count:
    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])

    def add(self, axis: str, kind: str, calls: int, size_bytes: int) -> None:
        if calls:
            entry = self.found[axis, kind]
            entry[0] += calls
            entry[1] += size_bytes


def rank_messages(
    plan: Plan,
    held: Held,
    costs: Sequence[StageCosts],
    pp_rank: int,
    candidate: Candidate,
    workload: Workload,
) -> dict[tuple[str, str], Messages]:
    """By (axis, kind of collective): axis "tp", "pp", "shared" (parameters that several stages hold) or "dp".

    Args:
        held: by this rank.
        costs: of every stage.
    """
    count = _Count()
    for stage in plan.stages_of(pp_rank):
        _count_stage(count, plan, stage, candidate.micro_batches, costs[stage], trains=workload.trains)
    if plan.topology.tp > 1 and workload.trains:  # the ranks compare their batches, before each forward or pipeline batch
        times = 1 if plan.topology.pp > 1 else candidate.micro_batches
        count.add("tp", "allreduce", times, times * _NUMBER * _COMPARED_NUMBERS * plan.topology.tp * plan.topology.pp)
    if plan.topology.pp > 1 and workload.trains:
        _count_losses(count, plan, pp_rank, candidate.micro_batches)
        _count_shared(count, held)
    if plan.topology.dp > 1 and workload.trains:
        count.add("dp", *_dp_collective(candidate.zero, held.parameters))
    return {key: Messages(*entry) for key, entry in count.found.items()}


def _count_stage(count: _Count, plan: Plan, stage: int, times: int, cost: StageCosts, *, trains: bool) -> None:
    """Every stage computes every micro-batch once, and exchanges values with its neighbours on other ranks."""
    holders, own = plan.rank_of_stage, plan.rank_of_stage[stage]
    for each in (cost.forward, cost.backward) if trains else (cost.forward,):
        for collective, (calls, size) in each.traffic.items():
            count.add("tp", collective, times * calls, times * size)
    if stage > 0 and holders[stage - 1] != own:
        _count_values(count, "recv", times, cost.received, header=True)
        if trains:
            _count_values(count, "send", times, [value for value in cost.received if value.has_gradient], header=False)
    if stage < len(holders) - 1 and holders[stage + 1] != own:
        _count_values(count, "send", times, cost.sent, header=True)
        if trains:
            _count_values(count, "recv", times, [value for value in cost.sent if value.has_gradient], header=False)


def _count_values(count: _Count, kind: str, times: int, values: Sequence[SentValue], *, header: bool) -> None:
    count.add("pp", kind, times * len(values), times * sum(value.bytes for value in values))
    if header:  # once a batch, on the control group: its length; then who, how many, and what each tensor is
        numbers = 5 + sum(3 + value.num_dims for value in values)
        count.add("pp", kind, 2, _NUMBER * (1 + numbers))


def _count_losses(count: _Count, plan: Plan, pp_rank: int, micro_batches: int) -> None:
    """Each loss goes from the last stage's rank to all others; at the end all tell how the batch went."""
    size = _NUMBER * _LOSS_NUMBERS
    if pp_rank == plan.rank_of_stage[-1]:
        times = micro_batches * (plan.topology.pp - 1)
        count.add("pp", "send", times, times * size)
    else:
        count.add("pp", "recv", micro_batches, micro_batches * size)
    count.add("pp", "allgather", 1, _NUMBER * _AGREED_NUMBERS)


def _count_shared(count: _Count, held: Held) -> None:
    """With the gradients of parameters that several stages hold goes a number each, of the stages that have one."""
    by_holders: dict[tuple[int, ...], list[Parameter]] = defaultdict(list)
    for parameter in held.parameters:
        if len(parameter.holders) > 1:
            by_holders[parameter.holders].append(parameter)
    for together in by_holders.values():
        dtype = together[0].dtype
        users = Parameter(len(together) * getattr(torch, dtype).itemsize, dtype, together[0].holders)
        sent = [users, *together]
        count.add("shared", "allreduce", _num_buckets(sent), sum(parameter.bytes for parameter in sent))


def _num_buckets(parameters: Iterable[Parameter]) -> int:
    """How many messages ``all_reduce_together`` makes of their gradients."""
    filled: dict[str, int] = {}
    buckets = 0
    for parameter in parameters:
        if parameter.dtype not in filled or filled[parameter.dtype] + parameter.bytes > _BUCKET_BYTES:
            buckets, filled[parameter.dtype] = buckets + 1, 0
        filled[parameter.dtype] += parameter.bytes
    return buckets


def _dp_collective(zero: int, parameters: Sequence[Parameter]) -> tuple[str, int, int]:
    """Gradients are summed; under ZeRO each rank gets its part of the sum, and gathers the weights that others have updated."""
    total = sum(parameter.bytes for parameter in parameters)
    if zero == 0:
        return "allreduce", _num_buckets(parameters), total
    return "reduce_scatter and allgather", 2 * _num_buckets(parameters), (3 if zero == 3 else 2) * total
