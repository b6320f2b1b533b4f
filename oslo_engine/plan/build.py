"""Building the plan of all ranks from what is known of the model and the data flow."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from oslo_engine.plan.plan import BlockCallPlan, Plan, TensorPlan
from oslo_engine.plan.survey import Cut, LogicalTensor, Prepared
from oslo_engine.topology import Topology

Call = tuple[str, int]


def build_plan(
    model: str,
    policy: str,
    prepared: Prepared,
    topology: Topology,
    *,
    schedule: str,
    sequence_parallel: bool = False,
    rank_of_stage: Sequence[int],
    calls: Sequence[Call],
    stage_of_call: Sequence[int],
    live_tensors: Sequence[Collection[str]],
) -> Plan:
    """Say for every tensor who holds what.

    Args:
        model, policy: their names.
        prepared: what the policy found in the model, for this number of tp ranks.
        rank_of_stage: the pp rank of each stage.
        calls: the block calls of a forward in order, as (block, nth call of it).
        stage_of_call: the stage of each.
        live_tensors: per stage the names of parameters and buffers outside the blocks that it reads.
    """
    match = prepared.match
    stages = _Stages(calls, stage_of_call, live_tensors, len(rank_of_stage))
    return Plan(
        policy=policy,
        model=model,
        topology=topology,
        schedule=schedule,
        sequence_parallel=sequence_parallel,
        num_stages=len(rank_of_stage),
        rank_of_stage=tuple(rank_of_stage),
        tensors=tuple(_tensor_plan(cut, stages, splits=sequence_parallel and topology.tp > 1) for cut in prepared.cuts),
        regions=tuple(match.regions),
        embeddings=tuple(match.embeddings),
        heads=tuple(match.heads),
        replicated=tuple(match.replicated.items()),
        stacks=tuple(match.stacks.items()),
        calls=tuple(BlockCallPlan(block, nth, stage) for (block, nth), stage in zip(calls, stage_of_call, strict=True)),
    )


def _tensor_plan(cut: Cut, stages: _Stages, *, splits: bool) -> TensorPlan:
    """
    Args:
        splits: whether blocks split the sequence: whole parameters see only this rank's tokens there.
    """
    tensor = cut.tensor
    whole = cut.shard is None and not tensor.is_buffer
    return TensorPlan(
        name=tensor.names[0],
        aliases=tensor.names,
        shape=tensor.shape,
        dtype=tensor.dtype,
        shard=cut.shard,
        stages=stages.holding(tensor),
        partial=cut.inside or (splits and whole and stages.run_block_of(tensor)),
        is_buffer=tensor.is_buffer,
        persistent=tensor.persistent,
    )


class _Stages:
    """Where the tensors of a model are needed."""

    def __init__(
        self, calls: Sequence[Call], stage_of_call: Sequence[int], live_tensors: Sequence[Collection[str]], num_stages: int
    ) -> None:
        self._last, self._all = (num_stages - 1,), tuple(range(num_stages))
        self._of_block: dict[str, set[int]] = {}
        for (block, _), stage in zip(calls, stage_of_call, strict=True):
            self._of_block.setdefault(block, set()).add(stage)
        self._reading: dict[str, set[int]] = {}
        for stage, names in enumerate(live_tensors):
            for name in names:
                self._reading.setdefault(name, set()).add(stage)

    def run_block_of(self, tensor: LogicalTensor) -> bool:
        """Whether it lies in a block that a forward calls."""
        return any(block in self._of_block for block in tensor.blocks)

    def holding(self, tensor: LogicalTensor) -> tuple[int, ...]:
        if tensor.is_buffer and not self.run_block_of(tensor):
            return self._all
        stages: set[int] = set()
        for block in tensor.blocks:
            stages |= self._of_block.get(block, set())
        for name in tensor.names:
            stages |= self._reading.get(name, set())
        return tuple(sorted(stages)) or self._last  # what no forward reads is still part of the model
