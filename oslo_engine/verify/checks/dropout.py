"""With dropout the split model cannot equal the unsplit one: the masks are others. What must hold instead."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oslo_engine.rewrite.state import parallel_state
from oslo_engine.verify.checks.check import Check
from oslo_engine.verify.checks.training import way_to_train
from oslo_engine.verify.compare import gradient_errors, relative_error, size_of
from oslo_engine.verify.report import Row, judge, not_applicable
from oslo_engine.verify.trial import Batch, Trial, gather_objects

_ACTIVATIONS = "dropout, activations of tp ranks"
_MASKS = "dropout, masks of tp ranks"
_SEED = "dropout, same seed, same loss"
_STEP = "dropout, other masks every step"
_RECOMPUTED = "dropout, gradients when recomputed"


def dropout_check(trial: Trial) -> Check:
    why_not = None
    if not trial.settings.dropout:
        why_not = "dropout is 0, see --dropout"
    elif trial.settings.num_ranks == 1:
        why_not = "one rank draws from torch's own generator"
    return Check((_ACTIVATIONS, _MASKS, _SEED, _STEP, _RECOMPUTED), _check, why_not)


def _check(trial: Trial) -> Iterator[Row]:
    """Two copies with one seed, and in one of them activation checkpointing."""
    batch, train = trial.batch(trial.shapes[0]), way_to_train(trial)
    first = trial.split_again().train()
    loss, _ = train(first, batch)
    with _Seen(first) as seen:
        next_loss, _ = train(first, batch)
    tp = parallel_state(first).mesh.tp
    yield _judge_activations(trial, seen, tp)
    yield _judge_masks(seen, tp)

    can_checkpoint = trial.reference.supports_gradient_checkpointing
    second = trial.split_again(gradient_checkpointing=can_checkpoint and not trial.settings.gradient_checkpointing).train()
    again, _ = train(second, batch)
    losses = {float(loss), *gather_objects(float(again))}
    yield judge(_SEED, len(losses) - 1, 0, f"{float(loss):.6g} on all ranks" if len(losses) == 1 else "losses differ")
    yield _judge_steps(first, batch, loss, next_loss)
    if can_checkpoint:
        first.zero_grad()
        parallel_state(first).streams.step = 0  # as a model that has just been made
        train(first, batch)
        yield _judge_gradients(trial, first, second)
    else:
        yield not_applicable(_RECOMPUTED, "this class knows no gradient checkpointing")


def _judge_activations(trial: Trial, seen: _Seen, tp: Any) -> Row:
    if tp.size == 1:
        return not_applicable(_ACTIVATIONS, "tp=1")
    if trial.settings.sequence_parallel:
        return not_applicable(_ACTIVATIONS, "each tp rank has its part of the sequence")
    blocks = [name for name, _ in seen.outputs]
    all_outputs = gather_objects([digest for _, digest in seen.outputs], tp.group)
    differing = [block for block, *digests in zip(blocks, *all_outputs, strict=True) if len(set(digests)) > 1]
    return judge(_ACTIVATIONS, len(differing), 0, differing[0] if differing else f"of {len(blocks)} blocks called")


def _judge_masks(seen: _Seen, tp: Any) -> Row:
    """On activations that the ranks share the masks must be equal, on their own ones all different."""
    if tp.size == 1:
        return not_applicable(_MASKS, "tp=1")
    wrong = split = shared = 0
    for calls in zip(*gather_objects(seen.masks, tp.group), strict=True):
        inputs, masks = {digest for digest, _ in calls}, [mask for _, mask in calls]
        length = min(len(mask) for mask in masks)  # ranks may have different numbers of heads
        distinct = len({mask[:length] for mask in masks})
        if len(inputs) == 1:
            shared += 1
            wrong += distinct != 1
        else:
            split += 1
            wrong += distinct != len(masks)
    if not split:
        return not_applicable(_MASKS, "no dropout on split activations")
    return judge(_MASKS, wrong, 0, f"{split} drawn for split activations, {shared} for shared ones")


def _judge_steps(model: Any, batch: Batch, loss: Tensor, next_loss: Tensor) -> Row:
    """The same batch in two steps: another loss, and neither is that of a model without dropout."""
    model.eval()
    with torch.no_grad():
        without = model(**batch).loss
    model.train()
    nearest = min(relative_error(next_loss, loss), relative_error(loss, without), relative_error(next_loss, without))
    detail = f"{float(loss):.6g}, then {float(next_loss):.6g}; without dropout {float(without):.6g}"
    return judge(_STEP, 0 if nearest > 1e-6 else 1, 0, detail)


def _judge_gradients(trial: Trial, first: nn.Module, second: nn.Module) -> Row:
    """Equal but for rounding: with a cache of keys, which checkpointing turns off, sums have another order."""
    others = {name: parameter.grad for name, parameter in second.named_parameters()}
    largest = max(size_of(grad, trial.limits) for grad in others.values() if grad is not None)
    pairs = ((name, parameter.grad, others[name]) for name, parameter in first.named_parameters())
    worst = gradient_errors(pairs, largest, trial.limits)
    return judge(_RECOMPUTED, worst.value, trial.limits.gradients, worst.name)


class _Seen(TorchFunctionMode):
    """While it is active: what the blocks of this rank returned, and the masks that were drawn.

    outputs: (block, digest of its output). masks: (digest of the input, which entries of the first row are zero).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.outputs: list[tuple[str, str]] = []
        self.masks: list[tuple[str, bytes]] = []
        state = parallel_state(model)
        here = set(state.plan.stages_of(state.mesh.at.pp_rank))
        blocks = dict.fromkeys(call.block for call in state.plan.calls if call.stage in here)
        self._hooks = [model.get_submodule(name).register_forward_hook(self._hook(name)) for name in blocks]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.dropout:
            given = args[0] if args else kwargs["input"]
            self.masks.append((_digest(given), (output[:1] == 0).flatten().numpy().tobytes()))
        return output

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            self.outputs.append((name, _digest(output[0] if isinstance(output, tuple) else output)))

        return note


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()
