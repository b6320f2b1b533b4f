"""Whether a model's loss can be put together from those of micro-batches.

A pipeline weighs each micro-batch by its share of the labels. That is right for a mean over labels, which nearly every loss is,
and silently wrong for a sum, a mean of means or a term over all positions. So the loss is asked: random logits, two rows with
different numbers of labels, together and each alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oslo_engine.errors import OsloError, UnsupportedError
from oslo_engine.pipeline.micro_batch import IGNORED_LABEL, loss_weights, split_batch, weigh_by_labels
from oslo_engine.pipeline.outer_loss import LABELS, OuterLoss, without_labels
from oslo_engine.rewrite.meta_weights import without_weights
from oslo_engine.rewrite.skeleton import example_inputs

_LARGEST_DIFFERENCE = 1e-4


def check_loss_adds_up(twin: PreTrainedModel, *, shift_labels: bool) -> None:
    """Compare the loss of two rows with the weighted sum of the losses of each.

    Args:
        twin: the model on meta, with the loss function of the real one.

    Models without a head that gives logits by rows, and those that do not run on such an example, are not judged.

    Raises:
        UnsupportedError: they differ.
    """
    try:
        whole, summed = _losses(twin, shift_labels)
    except OsloError:
        raise
    except Exception:  # whatever a model's own code raises on an example that it does not expect
        return
    if abs(whole - summed) > _LARGEST_DIFFERENCE * max(abs(whole), abs(summed)):
        raise UnsupportedError(
            "the loss of this model is no mean over its labels, so it cannot be put together from micro-batches",
            where=type(twin).__name__,
            expected=f"{whole:.6g}, the loss of two rows",
            got=f"{summed:.6g} from each row by its share of the labels",
            hint="use pp=1, or a loss that is the mean over all labels other than -100",
        )


def divides_by_count(twin: PreTrainedModel) -> bool:
    """Whether the model's loss is a sum divided by ``num_items_in_batch`` where it is given.

    Nearly every model takes that argument, and some then ignore it. True for a model that cannot be asked.

    Args:
        twin: the model on meta, with the loss function of the real one.
    """
    try:
        head, inputs = twin.get_output_embeddings(), example_inputs(twin, "train")
        if not isinstance(head, nn.Module) or not isinstance(inputs.get("labels"), Tensor):
            return True
        logits = _Logits(inputs["labels"].shape[0])
        with without_weights(twin), torch.no_grad():
            handle = head.register_forward_hook(logits)
            try:
                once, half = (_loss(twin, {**inputs, "num_items_in_batch": torch.tensor(count)}) for count in (1, 2))
            finally:
                handle.remove()
    except Exception:  # whatever a model's own code raises on an example that it does not expect
        return True
    return abs(once - 2 * half) <= _LARGEST_DIFFERENCE * abs(once)


def outer_loss(twin: PreTrainedModel, compute: Callable[[Any, Tensor, Any], Tensor]) -> OuterLoss:
    """How a loss from outside of the model can be put together from those of micro-batches.

    Args:
        twin: the model on meta.
        compute: see ``OuterLoss``.

    Raises:
        UnsupportedError: in no known way, or it cannot be asked.
    """
    reason = "another sum"
    try:
        found = _asked(twin, compute)
    except Exception as error:  # whatever a user's function raises on random logits
        found, reason = None, f"{type(error).__name__}: {error}"
    if found is None:
        raise UnsupportedError(
            "this loss from outside of the model cannot be put together from micro-batches",
            where=type(twin).__name__,
            expected="a function of logits and labels: a sum over labels, or a mean over all of them other than -100",
            got=reason,
            hint="use pp=1, or set model.loss_function before parallelize",
        )
    return found


def _asked(twin: PreTrainedModel, compute: Callable[[Any, Tensor, Any], Tensor]) -> OuterLoss | None:
    inputs = example_inputs(twin, "train")
    inputs[LABELS] = _uneven(inputs[LABELS])
    if twin.config.is_encoder_decoder:
        inputs.setdefault("decoder_input_ids", inputs[LABELS].clamp(min=0))
    micros, count = split_batch(inputs, 1), (inputs[LABELS] != IGNORED_LABEL).sum()
    logits, alone = _Logits(len(micros)), []
    with without_weights(twin), torch.no_grad():
        handle = twin.get_output_embeddings().register_forward_hook(logits)
        try:
            whole = float(compute(twin(**without_labels(inputs)), inputs[LABELS], count))
            for micro in micros:
                logits.of_row(micro.index)
                alone.append(float(compute(twin(**without_labels(micro.kwargs)), micro.kwargs[LABELS], count)))
        finally:
            handle.remove()
    ways = {(True, False): [1.0] * len(micros)}
    ways |= {(False, shift): loss_weights(micros, shift_labels=shift, divides_by_count=False) for shift in (True, False)}
    for (divides, shift), weights in ways.items():
        summed = sum(weight * loss for weight, loss in zip(weights, alone, strict=True))
        if abs(whole - summed) <= _LARGEST_DIFFERENCE * max(abs(whole), abs(summed)):
            return OuterLoss(compute, shift, divides)
    return None


def _losses(twin: PreTrainedModel, shift_labels: bool) -> tuple[float, float]:
    head = twin.get_output_embeddings()
    inputs = example_inputs(twin, "train")
    if not isinstance(head, nn.Module) or not isinstance(inputs.get("labels"), Tensor):
        return 0.0, 0.0
    inputs["labels"] = _uneven(inputs["labels"])
    micros = weigh_by_labels(split_batch(inputs, 1), shift_labels=shift_labels)
    whole = split_batch(inputs, len(micros))
    logits = _Logits(len(micros))
    with without_weights(twin), torch.no_grad():
        handle = head.register_forward_hook(logits)
        try:
            together = _loss(twin, whole[0].kwargs)
            alone = []
            for micro in micros:
                logits.of_row(micro.index)
                alone.append(_loss(twin, micro.kwargs))
        finally:
            handle.remove()
    return together, sum(micro.weight * loss for micro, loss in zip(micros, alone, strict=True))


def _loss(twin: PreTrainedModel, kwargs: Mapping[str, Any]) -> float:
    return float(twin(**kwargs).loss)


def _uneven(labels: Tensor) -> Tensor:
    """With fewer labels in the first row than in the others."""
    if labels.ndim != 2 or labels.is_floating_point():
        return labels
    labels = labels.clone()
    labels[0, 1 : 1 + labels.shape[1] // 2] = IGNORED_LABEL
    return labels


class _Logits:
    """A hook that answers a head with random numbers: for each row the same, together and alone.

    Raises:
        ValueError: the head's output is not divided by rows.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._row: int | None = None
        self._whole: Tensor | None = None

    def of_row(self, row: int) -> None:
        """From now on answer for this row alone."""
        self._row = row

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self._whole is None:
            if output.shape[0] != self._rows:
                raise ValueError(output.shape)
            generator = torch.Generator().manual_seed(0)
            self._whole = torch.randn(output.shape, generator=generator)
        return self._whole if self._row is None else self._whole[self._row : self._row + 1]
