"""A plan as rows of text: parameters that are alike in every block together, and what each rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from oslo_engine.topology import Coordinate

if TYPE_CHECKING:
    from oslo_engine.plan.plan import Plan, TensorPlan
    from oslo_engine.shards import Shard


def plan_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """(name, shape, split, bytes per rank, stages) of every parameter; ``h.*.weight (12)`` stands for those of 12 blocks."""
    together: dict[tuple[str, str, str, str], list[TensorPlan]] = {}
    for tensor in plan.parameters:
        key = (
            _pattern(tensor.name, plan),
            _shape(tensor, plan.parameters[0].dtype),
            _split(tensor),
            _bytes_per_rank(tensor, plan.topology.tp),
        )
        together.setdefault(key, []).append(tensor)
    for (name, shape, split, size), tensors in together.items():
        ties = [alias for alias in tensors[0].aliases if alias != tensors[0].name]
        count = f" ({len(tensors)})" if len(tensors) > 1 else ""
        stages = sorted({stage for tensor in tensors for stage in tensor.stages})
        yield name + count + "".join(f" = {alias}" for alias in ties), shape, split, size, ranges(stages)


def rank_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """(rank, pp, tp, stages, parameters, bytes) of every rank of one copy of the model."""
    for pp_rank in range(plan.topology.pp):
        for tp_rank in range(plan.topology.tp):
            held = [tensor for tensor in plan.held_by(pp_rank) if not tensor.is_buffer]
            size = sum(_bytes(tensor, tp_rank) for tensor in held)
            rank = plan.topology.rank(pp_rank=pp_rank, tp_rank=tp_rank)
            numel = plan.numel_on(Coordinate(pp_rank, 0, tp_rank))
            yield str(rank), str(pp_rank), str(tp_rank), ranges(plan.stages_of(pp_rank)), f"{numel:,}", readable(size)


def stage_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """(stage, pp rank, blocks) of every pipeline stage: ``model.layers 0-15``; blocks that run several times count once."""
    for stage in range(plan.num_stages):
        blocks = dict.fromkeys(call.block for call in plan.calls if call.stage == stage)
        numbers: dict[str, list[int]] = {}
        for block in blocks:
            path, _, number = block.rpartition(".")
            numbers.setdefault(path if number.isdigit() else block, []).extend([int(number)] if number.isdigit() else [])
        named = ", ".join(f"{path} {ranges(sorted(found))}" if found else path for path, found in numbers.items())
        yield str(stage), str(plan.rank_of_stage[stage]), named or "none"


def whole_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """(parameters, why) of what the policy leaves whole on purpose."""
    why: dict[str, dict[str, None]] = {}
    for name, reason in plan.replicated:
        why.setdefault(reason, {}).setdefault(_pattern(name, plan))
    yield from ((", ".join(names), reason) for reason, names in why.items())


def _pattern(name: str, plan: Plan) -> str:
    """The name with its block's number replaced by ``*``."""
    for _, blocks in plan.stacks:
        for block in blocks:
            if name.startswith(f"{block}."):
                path, _, number = block.rpartition(".")
                return f"{path}.*{name[len(block) :]}" if number.isdigit() and len(blocks) > 1 else name
    return name


def _shape(tensor: TensorPlan, usual_dtype: str) -> str:
    return " x ".join(map(str, tensor.shape)) + (f" {tensor.dtype}" if tensor.dtype != usual_dtype else "")


def _split(tensor: TensorPlan) -> str:
    """``dim 0: 66, 65``, or what the ranks do with a parameter that they all hold."""
    if tensor.shard is None:
        return "whole, gradients summed" if tensor.partial else "whole"
    return split_of(tensor.shard)


def split_of(shard: Shard) -> str:
    """``dim 0 in 3 parts: 66, 65``."""
    parts = max(len(spans) for spans in shard.spans)
    packed = f" in {parts} parts" if parts > 1 else ""
    shared = ", shared ones summed" if shard.overlaps else ""
    sizes = f"{shard.num_ranks} x {shard.sizes[0]}" if len(set(shard.sizes)) == 1 else ", ".join(map(str, shard.sizes))
    return f"dim {shard.dim}{packed}: {sizes}{shared}"


def _bytes(tensor: TensorPlan, tp_rank: int) -> int:
    import torch

    return math.prod(tensor.local_shape(tp_rank)) * getattr(torch, tensor.dtype).itemsize


def _bytes_per_rank(tensor: TensorPlan, tp: int) -> str:
    sizes = sorted({_bytes(tensor, tp_rank) for tp_rank in range(tp)})
    return " to ".join(readable(size) for size in sizes[:: max(len(sizes) - 1, 1)])


def readable(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


def ranges(numbers: Sequence[int]) -> str:
    """``0 1 2 5`` -> ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
