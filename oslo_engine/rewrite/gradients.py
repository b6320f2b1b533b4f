"""Norm and clipping of gradients that are spread over tensor- and pipeline-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as DTensorShard

from oslo_engine.errors import GradientError, UnsupportedError
from oslo_engine.plan.plan import TensorPlan
from oslo_engine.rewrite.state import ParallelState, parallel_state, parallelized


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils.clip_grad_norm_`` does for the whole
    model.

    Every gradient entry of the unsplit model counts once: slices on the ranks that hold them, replicated and tied parameters
        and
    replicated KV heads on one holder.

    Args:
        model: parallelized, possibly inside a wrapper such as DistributedDataParallel.
        norm_type: positive, or ``inf``.

    Returns:
        The norm before clipping, the same on every rank, a float32 scalar.

    Raises:
        GradientError: the norm is not finite and ``error_if_nonfinite``; on every rank, and no gradient is changed.
        UnsupportedError: a wrapper around the model has gradients of its own (prompt tuning).

    Communication: one all-reduce of a scalar over tp and pp, and one over dp where FSDP2 has divided the gradients. Collective:
        every rank must call it.
    """
    outer, model = model, parallelized(model)
    _check_all_inside(outer, model)
    state = parallel_state(model)
    total = _total_norm(model, state, float(norm_type))
    if error_if_nonfinite and not torch.isfinite(total):
        raise _not_finite(model, state, total)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device, parameter.grad.dtype))
    return total


def _not_finite(model: nn.Module, state: ParallelState, total: Tensor) -> GradientError:
    """Communication: one all-gather of a short text over tp and pp."""
    bad = [name for name, parameter in model.named_parameters() if not _is_finite(parameter.grad)]
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = f"rank {rank}: {bad[0]}{f' and {len(bad) - 1} more' if len(bad) > 1 else ''}" if bad else ""
    of_ranks = [mine]
    if state.mesh.model.size > 1:
        of_ranks = [""] * state.mesh.model.size
        dist.all_gather_object(of_ranks, mine, group=state.mesh.model.group)
    return GradientError(
        "the norm of the gradients is not a finite number, so they cannot be clipped",
        where="; ".join(text for text in of_ranks if text) or None,
        expected="finite gradients on every rank",
        got=str(total.item()),
        hint="skip this step (optimizer.zero_grad()), or go on from a checkpoint; for fp16 use oslo.GradScaler",
    )


def _is_finite(gradient: Tensor | None) -> bool:
    if gradient is None:
        return True
    return bool(torch.isfinite(gradient.to_local() if isinstance(gradient, DTensor) else gradient).all())


def _check_all_inside(outer: nn.Module, model: nn.Module) -> None:
    inside = {id(parameter) for parameter in model.parameters()}
    for name, parameter in outer.named_parameters():
        if parameter.grad is not None and id(parameter) not in inside:
            raise UnsupportedError(
                "the norm of a split model's gradients does not count those of a wrapper around it",
                where=name,
                hint="pass the model itself, and clip the others apart",
            )


def gradient_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm that ``clip_grad_norm_`` would clip, without clipping."""
    model = parallelized(model)
    return _total_norm(model, parallel_state(model), float(norm_type))


def _total_norm(model: nn.Module, state: ParallelState, norm_type: float) -> Tensor:
    largest = math.isinf(norm_type)
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    whole: list[Tensor] = []
    divided: dict[Any, list[Tensor]] = {}  # by the group of dp ranks that FSDP2 has divided them over
    for grad in _counted_gradients(model, state):
        if isinstance(grad, DTensor):
            divided.setdefault(_group_of(grad), []).append(_power_sum(grad.to_local(), norm_type))
        else:
            whole.append(_power_sum(grad, norm_type))
    for group, parts in divided.items():
        part = _joined(parts, largest)
        dist.all_reduce(part, op=operation, group=group)
        whole.append(part)
    total = _joined(whole, largest) if whole else torch.zeros((), device=state.mesh.device)
    if state.mesh.model.size > 1:
        dist.all_reduce(total, op=operation, group=state.mesh.model.group)
    return total if largest else total.pow(1.0 / norm_type)


def _joined(parts: list[Tensor], largest: bool) -> Tensor:
    stacked = torch.stack(parts)
    return stacked.max() if largest else stacked.sum()


def _group_of(grad: DTensor) -> Any:
    """Raises UnsupportedError where a gradient is divided in another way than FSDP2's over one axis."""
    if grad.device_mesh.ndim != 1 or not isinstance(grad.placements[0], DTensorShard):
        raise UnsupportedError(
            "the norm of gradients can be taken where fully_shard has divided them over one axis",
            expected='fully_shard(module, mesh=mesh["dp"])',
            got=f"placements {grad.placements} on {grad.device_mesh}",
        )
    return grad.device_mesh.get_group()


def _power_sum(grad: Tensor, norm_type: float) -> Tensor:
    exact = torch.promote_types(grad.dtype, torch.float32)
    if grad.numel() == 0:
        return torch.zeros((), device=grad.device)  # inf has no identity, and FSDP2 gives a rank nothing of a small tensor
    norm = torch.linalg.vector_norm(grad, norm_type, dtype=exact).float()
    return norm if math.isinf(norm_type) else norm.pow(norm_type)


class Answer(Enum):
    """How much of a parameter's gradient a rank answers for, so that every entry of the unsplit model's counts once."""

    ALL = "all that it holds"
    PART = "some of what it holds"
    NOTHING = "nothing"


def answer_for(state: ParallelState, name: str) -> Answer:
    """What this rank answers for of one of its parameters.

    Raises:
        KeyError: it was added after the model was split by tensor parallelism.
    """
    at = state.mesh.at
    if state.plan.topology.tp == 1 and not state.plan.knows(name):
        return Answer.ALL  # added by hand, in a block, which one stage holds
    tensor = state.plan.tensor(name)
    if at.pp_rank != state.plan.holders(tensor)[0]:
        return Answer.NOTHING
    if tensor.shard is None:
        return Answer.ALL if at.tp_rank == 0 else Answer.NOTHING
    return Answer.PART if tensor.shard.overlaps else Answer.ALL


def _counted_gradients(model: nn.Module, state: ParallelState) -> Iterator[Tensor]:
    """The gradients, or pieces of them, that this rank answers for."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        match answer_for(state, name):
            case Answer.ALL:
                yield parameter.grad
            case Answer.PART:
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                yield from _pieces(grad, state.plan.tensor(name), state.mesh.at.tp_rank)


def _pieces(grad: Tensor, tensor: TensorPlan, tp_rank: int) -> Iterator[Tensor]:
    """Of a slice that other ranks hold parts of as well, the parts that this rank is the first to hold."""
    shard, at = tensor.shard, 0
    assert shard is not None
    for span in shard.spans[tp_rank]:
        length = span[1] - span[0]
        first_holder = next(rank for rank, spans in enumerate(shard.spans) if span in spans)
        if first_holder == tp_rank:
            yield grad.narrow(shard.dim, at, length)
        at += length
