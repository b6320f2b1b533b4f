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
from oslo_engine.verify.compare import gradient_errors, size_of
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
    """Two copies with one seed; in the second one, activation checkpointing is then turned on (or off)."""
    batch, train = trial.batch(trial.shapes[0]), way_to_train(trial)
    first = trial.split_again().train()
    loss, _ = train(first, batch)
    with _Seen(first) as seen:
        train(first, batch)
    with _Seen(first) as seen_later:
        train(first, batch)
    tp = parallel_state(first).mesh.tp
    yield _judge_activations(trial, seen, tp)
    yield _judge_masks(seen, tp)

    second = trial.split_again().train()
    again, _ = train(second, batch)
    losses = {float(loss), *gather_objects(float(again))}
    yield judge(_SEED, len(losses) - 1, 0, f"{float(loss):.6g} on all ranks" if len(losses) == 1 else "losses differ")
    yield _judge_steps(seen, seen_later)
    yield _judge_recomputed(trial, second, batch)


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
        distinct = {mask[:length] for mask in masks}
        if len(inputs) == 1:
            shared += 1
            wrong += len(distinct) != 1
        elif any(1 in mask for mask in distinct):
            split += 1
            wrong += len(distinct) != len(masks)
    if not split:
        return not_applicable(_MASKS, "no dropout on split activations")
    return judge(_MASKS, wrong, 0, f"{split} drawn for split activations, {shared} for shared ones")


def _judge_steps(seen: _Seen, later: _Seen) -> Row:
    """The same batch in two steps: masks, somewhere, and none of them twice."""
    pairs = [(mask, next_mask) for (_, mask), (_, next_mask) in zip(seen.masks, later.masks, strict=True)]
    dropping = [pair for pair in pairs if any(1 in mask for mask in pair)]
    if not any(gather_objects(len(dropping))):
        return judge(_STEP, 1, 0, "nothing was dropped")
    if not dropping:
        return not_applicable(_STEP, "no dropout on this rank")
    return judge(_STEP, sum(mask == next_mask for mask, next_mask in dropping), 0, f"of {len(dropping)} masks")


def _judge_recomputed(trial: Trial, model: Any, batch: Batch) -> Row:
    """The gradients of a model that was run once against those of the same step with checkpointing turned on (or off).

    Equal but for rounding: models that checkpoint do without a cache of keys, and sum in another order.
    """
    if not trial.reference.supports_gradient_checkpointing:
        return not_applicable(_RECOMPUTED, "this class knows no gradient checkpointing")
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    if trial.settings.gradient_checkpointing:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable()
    model.zero_grad()
    parallel_state(model).streams.step = 0  # the same step again
    way_to_train(trial)(model, batch)
    largest = max(size_of(grad, trial.limits) for grad in before.values() if grad is not None)
    pairs = ((name, parameter.grad, before[name]) for name, parameter in model.named_parameters())
    worst = gradient_errors(pairs, largest, trial.limits)
    return judge(_RECOMPUTED, worst.value, trial.limits.gradients, worst.name)


class _Seen(TorchFunctionMode):
    """While it is active: what the blocks of this rank returned, and the masks that were drawn.

    outputs: (block, digest of its output). masks: (digest of the input, a byte for each entry of the first row: 1 if dropped).
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
            dropped = (output[:1] == 0) & (given[:1] != 0)
            self.masks.append((_digest(given), dropped.flatten().numpy().tobytes()))
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
