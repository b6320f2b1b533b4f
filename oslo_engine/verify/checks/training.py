"""Loss, every gradient, the gradient norm, and the weights after some steps, in each of the ways to train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.layers.vocab_shard import gather_logits
from oslo_engine.rewrite.gradients import clip_grad_norm_, gradient_norm
from oslo_engine.verify.checks.check import Check
from oslo_engine.verify.compare import (
    ADAM_EPS,
    ROUNDINGS,
    Error,
    Limits,
    gradient_errors,
    relative_error,
    size_of,
    without_padding,
)
from oslo_engine.verify.report import Row, judge, not_applicable
from oslo_engine.verify.trial import Batch, Trial, use_eager_experts

_NORM, _UPDATES = "gradient norm", "weights after 3 AdamW steps"
_LEARNING_RATE = 1e-2
_DROPOUT = "the unsplit model draws other dropout masks"


# How to run a batch forward and backward: (loss, what the model returned for each part of it).
_Way = Callable[[Any, Batch], tuple[Tensor, list[Any]]]


def one_backward(model: Any, batch: Batch) -> tuple[Tensor, list[Any]]:
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs.loss.detach(), [outputs]


def micro_batch_loop(model: Any, batch: Batch) -> tuple[Tensor, list[Any]]:
    losses, outputs = [], []
    for micro in model(**batch):
        micro.loss.backward()
        losses.append(micro.loss.detach())
        outputs.append(micro.outputs)
    return torch.stack(losses).sum(), outputs


def one_call(model: Any, batch: Batch) -> tuple[Tensor, list[Any]]:
    return model.train_step(batch), []


def way_to_train(trial: Trial) -> _Way:
    return one_backward if trial.settings.pp == 1 else micro_batch_loop


def training_check(trial: Trial) -> Check:
    plain = "one backward" if trial.settings.pp == 1 else "micro-batch loop"
    labels = (plain, "train_step", "other shape, accumulated")
    rows = ["logits, training", *(f"{what}, {label}" for label in labels for what in ("loss", "gradients")), _NORM]
    return Check(tuple(rows), lambda trial: _train(trial, labels), _DROPOUT if trial.settings.dropout else None)


def optimizer_check(trial: Trial) -> Check:
    why_not = None
    if trial.settings.dropout:
        why_not = _DROPOUT
    elif trial.limits.updates is None:
        why_not = "16-bit weights round most of an update away"
    return Check((_UPDATES,), _optimize, why_not)


def _train(trial: Trial, labels: tuple[str, ...]) -> Iterator[Row]:
    """Three batches of different shapes; the third one's gradients are added to the second one's."""
    plain, norm_error = way_to_train(trial), 0.0
    summed: list[Batch] = []
    trial.reference.train()
    trial.model.train()
    for number, (label, way, shape) in enumerate(zip(labels, (plain, one_call, plain), trial.shapes, strict=True)):
        batch = trial.batch(shape, number)
        if number < 2:
            trial.reference.zero_grad()
            trial.model.zero_grad()
            summed.clear()
        summed.append(batch)
        wanted, whole = one_backward(trial.reference, batch)
        got, parts = way(trial.model, batch)
        if number == 0:
            yield _training_logits(trial, batch, parts, whole[0].logits)
        limits = trial.limits_for(wanted)
        yield judge(f"loss, {label}", relative_error(got, wanted), limits.loss)
        worst = gradient_error(trial, limits, summed)
        yield judge(f"gradients, {label}", worst.value, limits.gradients, worst.name)
        norm_error = max(norm_error, relative_error(gradient_norm(trial.model), _norm(trial.reference)))
    yield judge(_NORM, norm_error, limits.norm)


def _training_logits(trial: Trial, batch: Batch, parts: list[Any], wanted: Tensor) -> Row:
    """What ``gather_logits`` makes of the slices; in a pipeline only the last stage's rank has them."""
    if not parts or parts[0] is None:
        return not_applicable("logits, training", "this stage has none")
    got = torch.cat([gather_logits(part).logits.detach() for part in parts])
    if got.shape == wanted.shape:
        got, wanted = without_padding(got, batch), without_padding(wanted, batch)
    return judge("logits, training", relative_error(got, wanted), trial.limits.logits)


def gradient_error(trial: Trial, limits: Limits, batches: Sequence[Batch], model: Any = None) -> Error:
    """The worst of the gradients of the split model, beside those that the unsplit one has now.

    Args:
        batches: what both were given: what rounding does to it counts as no error, see ``gradient_errors``.
        model: a split model other than the trial's.
    """
    split = trial.model if model is None else model
    worst = _gradient_error(trial, split, limits)
    if worst.value > limits.gradients and trial.settings.dtype == "float32":
        worst = _gradient_error(trial, split, limits, _rounding(trial, batches, limits))
    return worst


def _gradient_error(trial: Trial, split: Any, limits: Limits, rounding: dict[str, float] | None = None) -> Error:
    whole = {name: parameter.grad for name, parameter in trial.reference.named_parameters()}
    return gradient_errors(
        (
            (name, parameter.grad, None if (grad := whole[name]) is None else trial.slice_of(grad, tensor))
            for name, parameter, tensor in trial.parameters(split)
        ),
        max(size_of(grad, limits) for grad in whole.values() if grad is not None),
        limits,
        rounding,
    )


def _rounding(trial: Trial, batches: Sequence[Batch], limits: Limits) -> dict[str, float]:
    """How far the unsplit model's gradients in float32 are from those in float64."""
    exact, rounded = _exact(trial.reference), copy.deepcopy(trial.reference)
    for model in (exact, rounded):
        model.zero_grad()
        for batch in batches:
            one_backward(model, {name: _as(model, value) for name, value in batch.items()})
    pairs = zip(exact.named_parameters(), rounded.parameters(), strict=True)
    return {
        name: size_of(ours.grad.double() - wanted.grad, limits)
        for (name, wanted), ours in pairs
        if wanted.grad is not None and ours.grad is not None
    }


def _exact(model: nn.Module) -> nn.Module:
    """A copy in float64."""
    exact = copy.deepcopy(model).double()
    use_eager_experts(exact)
    return exact


def _as(model: nn.Module, value: Tensor) -> Tensor:
    return value.to(next(model.parameters()).dtype) if value.is_floating_point() else value


def _norm(model: nn.Module) -> Tensor:
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def _optimize(trial: Trial) -> Iterator[Row]:
    """AdamW with clipping to half of the first batch's norm; the weights are put back afterwards."""
    batches = [trial.batch(shape, 10 + number) for number, shape in enumerate(trial.shapes)]
    trial.reference.zero_grad()
    one_backward(trial.reference, batches[0])
    max_norm = float(_norm(trial.reference)) / 2
    gradients = [parameter.grad for parameter in trial.reference.parameters() if parameter.grad is not None]
    eps = ADAM_EPS * max(float(gradient.abs().max()) for gradient in gradients) / 2
    ways = [one_call if number == 1 else way_to_train(trial) for number in range(len(batches))]
    wanted = _updates(trial.reference, batches, [one_backward] * len(batches), torch.nn.utils.clip_grad_norm_, max_norm, eps)
    got = _updates(trial.model, batches, ways, clip_grad_norm_, max_norm, eps)
    worst = _update_error(trial, got, wanted)
    assert trial.limits.updates is not None
    if worst.value > trial.limits.updates and trial.settings.dtype == "float32":
        exact = _exact(trial.reference)
        unrounded = _updates(exact, batches, [one_backward] * len(batches), torch.nn.utils.clip_grad_norm_, max_norm, eps)
        rounding = {name: float((wanted[name] - unrounded[name]).abs().max()) for name in wanted}
        worst = _update_error(trial, got, wanted, rounding)
    yield judge(_UPDATES, worst.value, trial.limits.updates, worst.name)


def _updates(
    model: Any, batches: Sequence[Batch], ways: Sequence[_Way], clip: Callable[..., Any], max_norm: float, eps: float
) -> dict[str, Tensor]:
    """What one step for each batch changes about the weights, which are put back."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, eps=eps, weight_decay=0.1)
    for way, batch in zip(ways, batches, strict=True):
        optimizer.zero_grad()
        way(model, {name: _as(model, value) for name, value in batch.items()})
        clip(model if clip is clip_grad_norm_ else model.parameters(), max_norm)
        optimizer.step()
    updates = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data.copy_(before[name])
    return updates


def _update_error(
    trial: Trial, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rounding: Mapping[str, float] | None = None
) -> Error:
    """Relative to the largest update of all, which is the same for every parameter where gradients are not small."""
    largest = max(float(update.abs().max()) for update in wanted.values())
    worst = Error(0.0)
    for name, _, tensor in trial.parameters():
        error = relative_error(got[name], trial.slice_of(wanted[tensor.name], tensor), largest)
        if rounding is not None:
            error = max(error - ROUNDINGS * rounding[tensor.name] / largest, 0.0)
        worst = max(worst, Error(error, tensor.name), key=lambda each: each.value)
    return worst
