"""Building the plan of all ranks from a matched policy and the data flow of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from oslo_engine.errors import PlanError
from oslo_engine.plan.match import Match
from oslo_engine.plan.plan import BlockCallPlan, Plan, RegionPlan, TensorPlan
from oslo_engine.topology import Topology


def build_plan(
    model: PreTrainedModel,
    policy: str,
    match: Match,
    topology: Topology,
    *,
    schedule: str,
    sequence_parallel: bool = False,
    rank_of_stage: Sequence[int],
    calls: Sequence[tuple[str, int]],
    stage_of_call: Sequence[int],
    live_tensors: Sequence[Collection[str]],
) -> Plan:
    """Say for every tensor who holds what.

    Args:
        model: the skeleton: its names, shapes and ties are read.
        match: what the policy found in it.
        rank_of_stage: the pp rank of each stage.
        calls: the block calls of a forward in order, as (block, nth call of it).
        stage_of_call: the stage of each.
        live_tensors: per stage the names of parameters and buffers outside the blocks that it reads.
    """
    num_stages = len(rank_of_stage)
    stages_of_block: dict[str, set[int]] = {}
    for (block, _), stage in zip(calls, stage_of_call, strict=True):
        stages_of_block.setdefault(block, set()).add(stage)
    is_partial = _partial_names(match.regions)

    def stages_of(names: Collection[str]) -> tuple[int, ...]:
        stages: set[int] = set()
        for name in names:
            block = _block_of(name, stages_of_block)
            if block is not None:
                stages |= stages_of_block[block]
            stages |= {stage for stage, live in enumerate(live_tensors) if name in live}
        return tuple(sorted(stages)) or (num_stages - 1,)  # what no forward reads is still part of the model

    tensors = []
    for names, tensor, is_buffer, persistent in _logical_tensors(model):
        shards = {match.shards.get(name) for name in names}
        if len(shards) > 1:
            raise PlanError("tied parameters must be cut alike", where=", ".join(names))
        shard = shards.pop()
        # Uncut parameters see only this rank's heads inside a region, only its tokens anywhere in a block that splits the
        # sequence.
        partial = (
            topology.tp > 1
            and shard is None
            and not is_buffer
            and any(is_partial(name) or (sequence_parallel and _block_of(name, stages_of_block) is not None) for name in names)
        )
        stages = (
            tuple(range(num_stages))
            if is_buffer and not any(_block_of(n, stages_of_block) for n in names)
            else stages_of(names)
        )
        tensors.append(
            TensorPlan(
                name=names[0],
                aliases=tuple(names),
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                shard=shard,
                stages=stages,
                partial=partial,
                is_buffer=is_buffer,
                persistent=persistent,
            )
        )
    return Plan(
        policy=policy,
        model=type(model).__name__,
        topology=topology,
        schedule=schedule,
        sequence_parallel=sequence_parallel,
        num_stages=num_stages,
        rank_of_stage=tuple(rank_of_stage),
        tensors=tuple(tensors),
        regions=tuple(match.regions),
        embeddings=tuple(match.embeddings),
        heads=tuple(match.heads),
        replicated=tuple(match.replicated.items()),
        stacks=tuple(match.stacks.items()),
        calls=tuple(BlockCallPlan(block, nth, stage) for (block, nth), stage in zip(calls, stage_of_call, strict=True)),
    )


def _logical_tensors(model: PreTrainedModel) -> Iterator[tuple[list[str], Tensor, bool, bool]]:
    """(names, tensor, is buffer, is in the state dict), tied names together, in the order of the model."""
    by_id: dict[int, tuple[list[str], Tensor, bool]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), ([], parameter, False))[0].append(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        by_id.setdefault(id(buffer), ([], buffer, True))[0].append(name)
    for names, tensor, is_buffer in by_id.values():
        yield names, tensor, is_buffer, not is_buffer or any(_is_persistent(model, name) for name in names)


def _partial_names(regions: Sequence[RegionPlan]) -> Callable[[str], bool]:
    """Whether an uncut parameter of this name lies inside a region: it sees only this rank's share of the items there."""
    scopes = tuple(f"{region.scope}." for region in regions if region.enter == "scope")
    # What stands behind a sum over the ranks is outside again: biases of rows.
    outside = {name for region in regions if region.leave == "rows" for name in (*region.rows, *region.inner)}
    named = {name for region in regions for name in (*region.summed, *region.once)}

    def is_partial(name: str) -> bool:
        return name in named or (name.startswith(scopes) and name.rpartition(".")[0] not in outside)

    return is_partial


def _is_persistent(model: PreTrainedModel, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(path)._non_persistent_buffers_set


def _block_of(name: str, blocks: Collection[str]) -> str | None:
    parts = name.split(".")
    return next((prefix for end in range(len(parts), 0, -1) if (prefix := ".".join(parts[:end])) in blocks), None)
