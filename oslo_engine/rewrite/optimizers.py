"""What an optimizer is asked before it first changes a split model, since nothing else would tell that the numbers go wrong.

Optimizers are built by the user, or by a library, around parameters. So a hook of torch, which runs before every step of every
optimizer, asks: Does it hold the model's parameters, or those that the model had before it was split? Does it treat a slice as
it would treat the whole? And are gradients that several ranks hold still the same on all of them?
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from oslo_engine.errors import GradientError, UnsupportedError
from oslo_engine.rewrite.entrywise import works_entrywise
from oslo_engine.rewrite.state import ParallelState, parallel_state

_STEPS_COMPARED = 2
_TOLERANCE = 1e-3  # of a norm; the same gradients are rounded a little differently by different ranks
_CHANCE = 1e-5  # so near to one another the norms of different gradients do not come by chance
_NOISE = 1e-6  # of the norm of all gradients: below it lies what is zero but for rounding
_REPLACED = "_oslo_replaced"
_models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_seen: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


@dataclass
class _Seen:
    """num_groups: those that were asked about. compared: steps. written: what this rank has told the others, by key."""

    num_groups: int
    compared: int = 0
    written: dict[str, _Norm] = field(default_factory=dict)


@dataclass(frozen=True)
class _Norm:
    """A norm of gradients. ranks: the others that have one under the same key.

    alike: whether theirs must be the same; otherwise they are of other gradients, and it is a sign of clipping if all are.
    """

    value: float
    ranks: tuple[int, ...]
    alike: bool = True

    def differs_from(self, others: dict[int, float]) -> dict[int, float]:
        return {rank: other for rank, other in others.items() if abs(other - self.value) > _TOLERANCE * max(other, self.value)}

    def was_scaled_to(self, others: dict[int, float]) -> bool:
        equal = [abs(other - self.value) <= _CHANCE * self.value for other in others.values()]
        return len(equal) == len(self.ranks) and all(equal)


@dataclass(frozen=True)
class _Held:
    """What an optimizer holds of a split model: by name."""

    state: ParallelState
    parameters: dict[str, nn.Parameter]

    def is_divided(self, name: str) -> bool:
        return self.state.plan.knows(name) and self.state.plan.tensor(name).shard is not None


def watch_optimizers_of(model: PreTrainedModel) -> None:
    """From now on whatever steps over this model's parameters is asked."""
    _models.add(model)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def mark_replaced(parameter: Tensor) -> None:
    """Remember that a model has another parameter in the place of this one."""
    setattr(parameter, _REPLACED, True)


def check_optimizer(optimizer: Optimizer) -> None:
    """Ask about the optimizer's parameters and how it treats them; its first step asks as well.

    Raises:
        UnsupportedError: it was built before the model was split, or it does not work entry by entry.

    Communication: none; the answer is the same on all ranks that hold parts of the same parameters.
    """
    _check_built_after(optimizer)
    for held in _held_by(optimizer):
        _check_entrywise(optimizer, held)
    _seen[optimizer] = _Seen(len(optimizer.param_groups))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    seen = _seen.get(optimizer)
    if seen is None or seen.num_groups != len(optimizer.param_groups):
        check_optimizer(optimizer)
        seen = _seen[optimizer]
    if seen.compared <= _STEPS_COMPARED:
        _compare_gradients(optimizer, seen)


def _parameters_of(optimizer: Optimizer) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _held_by(optimizer: Optimizer) -> list[_Held]:
    mine = {id(parameter) for parameter in _parameters_of(optimizer)}
    found = []
    for model in list(_models):
        parameters = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in mine}
        if parameters:
            found.append(_Held(parallel_state(model), parameters))
    return found


def _check_built_after(optimizer: Optimizer) -> None:
    every = list(_parameters_of(optimizer))
    # One with a gradient is used elsewhere, and trained there.
    gone = [parameter for parameter in every if getattr(parameter, _REPLACED, False) and parameter.grad is None]
    if gone:
        raise UnsupportedError(
            "the optimizer was built before parallelize: it holds parameters that the model does not have any more",
            where=type(optimizer).__name__,
            expected="the parameters of the split model",
            got=f"{len(gone)} of {len(every)} parameters that parallelize has replaced by this rank's",
            hint="build it behind parallelize, from model.gpu_parameters() (and the learning-rate scheduler after it)",
        )


def _check_entrywise(optimizer: Optimizer, held: _Held) -> None:
    topology, device = held.state.plan.topology, held.state.mesh.device
    divided = {id(parameter) for name, parameter in held.parameters.items() if held.is_divided(name)}
    inside = {id(parameter) for parameter in held.parameters.values()}
    for group in optimizer.param_groups:
        tp = any(id(parameter) in divided for parameter in group["params"])
        pp = topology.pp > 1 and any(id(parameter) in inside for parameter in group["params"])
        if not tp and not pp:
            continue
        found = works_entrywise(optimizer, group, device, tp=tp, pp=pp)
        name = type(optimizer).__name__
        if found is None:
            warnings.warn(
                f"oslo_engine could not find out whether {name} works entry by entry. If it looks at whole matrices, or at all "
                "parameters together, a model that is split trains differently with it.",
                stacklevel=4,
            )
            return
        if not found:
            raise UnsupportedError(
                f"{name} does not work entry by entry: it would change a rank's part of a weight otherwise than the whole",
                where=f"{type(optimizer).__module__}.{name}, tp={topology.tp}, pp={topology.pp}",
                expected="an optimizer such as AdamW, Adam, SGD, RMSprop, Adagrad or Lion",
                hint=f"use one of these; {name} works with tp=1 and pp=1"
                + ("" if topology.pp > 1 else ", and many such optimizers with tp=1 and pp > 1"),
            )


def _compare_gradients(optimizer: Optimizer, seen: _Seen) -> None:
    """Whether gradients that other ranks hold as well have the same norm there.

    Through the job's store and one step late, so no rank waits for another: some may skip a step, or have no optimizer.
    The batch in between has brought the others past the step that is asked about.

    Raises:
        GradientError: they have not.
    """
    numbers = {key: entry for held in _held_by(optimizer) for key, entry in _told_norms(held).items()}
    told, seen.written = seen.written, {}
    seen.compared += 1
    if not numbers and not told:
        return
    store: Any = dist.distributed_c10d._get_default_store()
    for key, norm in told.items():
        others = {rank: float(store.get(f"{key}/{rank}")) for rank in norm.ranks if store.check([f"{key}/{rank}"])}
        if norm.alike and (apart := norm.differs_from(others)):
            raise _not_alike(norm.value, apart)
        if not norm.alike and norm.was_scaled_to(others):
            raise _clipped_apart(norm.value, others)
    if seen.compared <= _STEPS_COMPARED:
        for key, norm in numbers.items():
            store.set(f"{key}/{dist.get_rank()}", repr(norm.value))
        seen.written = numbers


_CLIPPING_HINT = (
    "torch.nn.utils.clip_grad_norm_ scales the part of each rank by another factor: "
    "use oslo.clip_grad_norm_(model, max_norm). Weights have been changed: start again, or go on from a checkpoint"
)


def _not_alike(norm: float, apart: dict[int, float]) -> GradientError:
    return GradientError(
        "gradients of parameters that several ranks hold were not the same on all of them in the last step",
        where=f"rank {dist.get_rank()}, and rank {', '.join(map(str, apart))}",
        expected="the same norm",
        got=f"{norm:.6g} here, {', '.join(f'{other:.6g}' for other in apart.values())} there",
        hint=_CLIPPING_HINT,
    )


def _clipped_apart(norm: float, others: dict[int, float]) -> GradientError:
    return GradientError(
        "the gradients of all pipeline stages had the same norm in the last step: each stage was clipped by itself",
        where=f"ranks {', '.join(map(str, sorted((dist.get_rank(), *others))))}",
        expected="one factor for all stages, which leaves their norms apart",
        got=f"{norm:.6g} everywhere",
        hint=_CLIPPING_HINT,
    )


def _told_norms(held: _Held) -> dict[str, _Norm]:
    """Norms of the gradients that certain other ranks hold as well, and of all of a stage's, by a key that is the same there.

    The key tells the call that was the last, which all ranks of a copy count alike.
    """
    state, calls = held.state, held.state.mesh.calls
    gradients = {
        name: parameter.grad
        for name, parameter in held.parameters.items()
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor) and state.plan.knows(name)
    }
    if not gradients or state.mesh.model.size == 1 or not dist.is_initialized() or not calls.standing.number:
        return {}
    if state.mesh.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return {}
    everything = _norm(list(gradients.values()))
    found = {}

    def tell(which: str, norm: _Norm) -> None:
        at = f"{calls.standing.number}/{calls.standing.trail}"
        found[f"oslo_engine/gradients/{calls.name}/{at}/{zlib.crc32(which.encode())}"] = norm

    for with_whom, ranks, names in _sharing(state, list(gradients)):
        norm = _norm([gradients[name] for name in names])
        if names and norm < float("inf") and norm > _NOISE * everything:
            tell("\n".join([with_whom, *(state.plan.tensor(name).name for name in names)]), _Norm(norm, ranks))
    if state.plan.topology.tp == 1 and 0 < everything < float("inf"):  # with more, tp ranks have something to compare
        ranks = tuple(rank for rank in calls.model_ranks if rank != dist.get_rank())
        tell(f"all of {sorted(calls.model_ranks)}", _Norm(everything, ranks, alike=False))
    return found


def _sharing(state: ParallelState, names: list[str]) -> Iterator[tuple[str, tuple[int, ...], list[str]]]:
    """Groups of ranks as the job numbers them, with what they hold alike: (a name of the group, the other ranks, names)."""
    at, topology, plan = state.mesh.at, state.plan.topology, state.plan
    mine = dist.get_rank()
    if topology.tp > 1:
        ranks = tuple(rank for rank in state.mesh.calls.tp_ranks if rank != mine)
        yield f"tp of {sorted((mine, *ranks))}", ranks, [name for name in names if plan.tensor(name).shard is None]
    for stage in range(topology.pp):
        if stage != at.pp_rank:
            (peer,) = (
                rank
                for rank in state.mesh.calls.model_ranks
                if (there := topology.coordinate(rank)).pp_rank == stage and there.tp_rank == at.tp_rank
            )
            shared = [name for name in names if stage in plan.holders(plan.tensor(name))]
            # In one order on both: a tied parameter may go by another of its names there.
            yield f"pp of {sorted((mine, peer))}", (peer,), sorted(shared, key=lambda name: plan.tensor(name).name)


def _norm(gradients: list[Tensor]) -> float:
    if not gradients:
        return 0.0
    parts = [gradient.detach().norm(dtype=torch.promote_types(gradient.dtype, torch.float32)) for gradient in gradients]
    return float(torch.stack([part.double() for part in parts]).norm())
