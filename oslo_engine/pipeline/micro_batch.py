"""Cutting a batch into micro-batches, and what share of the loss each of them carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from oslo_engine.comm.fingerprint import contents
from oslo_engine.errors import BatchError

IGNORED_LABEL = -100
_ROW_NAMES = ("input_ids", "inputs_embeds")
_SPAN_LABELS = ("start_positions", "end_positions")
_PASSED_ON = "num_items_in_batch"


@dataclass(frozen=True)
class MicroBatch:
    """The keyword arguments of one micro-batch.

    weight: what its loss is multiplied by, so that the losses of all micro-batches add up to the whole batch's.
    signature: equal for micro-batches whose arguments have equal names, shapes, dtypes and plain values.
    context: what the stage program wants to know about the batch; the runtime hands it on.
    """

    index: int
    kwargs: dict[str, Any]
    weight: float
    signature: tuple[Any, ...]
    context: Any = None


def split_batch(kwargs: Mapping[str, Any], micro_batch_size: int) -> list[MicroBatch]:
    """Cut a batch into pieces of ``micro_batch_size`` rows; the last may be smaller. Each weighs its share of the rows.

    The rows are those of ``input_ids``, else ``inputs_embeds``, else the first tensor. Tensors whose first dimension is the
    rows are cut, also inside tuples, lists, dicts and model outputs (``encoder_outputs``). Scalars, tensors whose first
    dimension is 1 and anything that is not a tensor go to every micro-batch as they are.

    Raises:
        BatchError: no tensor, no row, or tensors with another number of rows (all of them are named).
    """
    if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise BatchError("the micro-batch size must be a positive integer", expected=">= 1 rows", got=repr(micro_batch_size))
    tensors = {name: leaf for name, leaf in _named_leaves(kwargs) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    rows_from, rows = _rows(tensors)
    misfits = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor.shape[0] not in (1, rows)}
    if misfits:
        raise BatchError(
            "the tensors of a batch have different numbers of rows",
            where=", ".join(f"{name} {shape}" for name, shape in misfits.items()),
            expected=f"first dimension {rows}, as {rows_from} has, or 1",
            got=", ".join(str(shape[0]) for shape in misfits.values()),
            hint="give every tensor one row per example; what has no rows can be passed as a scalar or with first dimension 1",
        )

    def piece(leaf: Any, start: int, stop: int) -> Any:
        split = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
        return leaf[start:stop] if split else leaf

    micros = []
    for index, start in enumerate(range(0, rows, micro_batch_size)):
        stop = min(start + micro_batch_size, rows)
        pieces = pytree.tree_map(partial(piece, start=start, stop=stop), dict(kwargs))
        signature = tuple((name, _describe(leaf)) for name, leaf in _named_leaves(pieces))
        micros.append(MicroBatch(index, pieces, (stop - start) / rows, signature))
    return micros


def weigh_by_labels(micros: Sequence[MicroBatch], *, shift_labels: bool, divides_by_count: bool = True) -> list[MicroBatch]:
    """The micro-batches of a training batch, weighted by ``loss_weights``."""
    weights = loss_weights(micros, shift_labels=shift_labels, divides_by_count=divides_by_count)
    return [replace(micro, weight=weight) for micro, weight in zip(micros, weights, strict=True)]


def loss_weights(micros: Sequence[MicroBatch], *, shift_labels: bool, divides_by_count: bool = True) -> list[float]:
    """Each micro-batch's share of what the unsplit model's loss takes the mean over; the shares add up to 1.

    That is the labels other than ``ignore_index`` (integers; -100 by default) or all elements (floating point). A micro-batch
    without any weighs 0. With ``num_items_in_batch`` a model that divides by it divides by the total, and every weight is 1.

    Args:
        shift_labels: the loss compares position t with the label at t + 1, so the first label of a row does not count. Labels
            given as ``shift_labels`` are shifted already.
        divides_by_count: whether the model's loss heeds ``num_items_in_batch``; some take it and do not.

    Raises:
        BatchError: no label in the whole batch, or several kinds of labels whose shares differ, so that no weight is right.
    """
    names = _label_names(micros[0].kwargs)
    if not names:
        raise BatchError(
            "a batch without labels cannot be trained on",
            expected="labels, or another argument with 'label' in its name",
            got=", ".join(sorted(micros[0].kwargs)),
            hint="pass labels=..., or evaluate under torch.no_grad()",
        )
    if divides_by_count and micros[0].kwargs.get(_PASSED_ON) is not None:
        return [1.0] * len(micros)
    counts = {name: _counts(micros, name, shift_labels) for name in names}
    for name, count in counts.items():
        if sum(count) == 0:
            raise BatchError(
                "a batch has no label to learn from",
                where=name,
                expected=f"a label other than {IGNORED_LABEL}" + (" after the first position" if shift_labels else ""),
                got="none in any row",
            )
    shares = {name: [number / sum(count) for number in count] for name, count in counts.items()}
    first, *others = shares.values()
    if any(share != first for share in others):
        raise BatchError(
            "a batch has several kinds of labels that are spread differently over its micro-batches",
            where="; ".join(f"{name}: {count}" for name, count in counts.items()),
            expected="the same share of each kind in every micro-batch, since their losses come as one sum",
            got="different shares",
            hint="use pp=1 with tp, which runs a batch as one, or pass only one kind of labels",
        )
    return first


def fingerprint(micros: Sequence[MicroBatch]) -> Tensor:
    """A number that all but surely differs between different batches, made of the ``contents`` of all tensors.

    Returns: an int64 scalar on the device of the batch; reading it waits for that.
    """
    leaves = [leaf for micro in micros for leaf in pytree.tree_leaves(micro.kwargs) if isinstance(leaf, Tensor)]
    return torch.stack([contents(leaf) * (2 * index + 1) for index, leaf in enumerate(leaves)]).sum()


def _rows(tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    name = next((name for name in _ROW_NAMES if name in tensors), next(iter(tensors), None))
    if name is None or tensors[name].shape[0] == 0:
        raise BatchError(
            "a batch has no rows",
            where=name,
            expected="a tensor whose first dimension is the number of examples",
            got="no tensor" if name is None else f"{name} {tuple(tensors[name].shape)}",
        )
    return name, tensors[name].shape[0]


def _named_leaves(kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """``input_ids``, or ``encoder_outputs[0]``, ``encoder_outputs[1]`` for what a container holds."""
    named = []
    for name, value in kwargs.items():
        leaves = pytree.tree_leaves(value)
        alone = len(leaves) == 1 and leaves[0] is value
        named += [(name if alone else f"{name}[{at}]", leaf) for at, leaf in enumerate(leaves)]
    return named


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__qualname__


def _label_names(kwargs: Mapping[str, Any]) -> list[str]:
    """The arguments that the loss compares with; ``shift_labels`` replaces ``labels`` where both are given."""
    given = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    names = [name for name in given if "label" in name or name in _SPAN_LABELS]
    return [name for name in names if not (name == "labels" and "shift_labels" in names)]


def _counts(micros: Sequence[MicroBatch], name: str, shift_labels: bool) -> list[int]:
    counted = []
    for micro in micros:
        labels = micro.kwargs[name]
        if name in _SPAN_LABELS:
            counted.append((labels < _length(micro)).sum())  # question answering ignores positions past the end
        elif labels.is_floating_point():
            counted.append(torch.tensor(labels.numel()))
        else:
            shifted = shift_labels and name == "labels" and labels.dim() > 1
            ignored = micro.kwargs.get("ignore_index", IGNORED_LABEL)
            counted.append(((labels[:, 1:] if shifted else labels) != ignored).sum())
    return torch.stack(counted).tolist()  # one wait for the device, not one per micro-batch


def _length(micro: MicroBatch) -> int:
    ids = next((micro.kwargs[name] for name in _ROW_NAMES if micro.kwargs.get(name) is not None), None)
    return int(ids.shape[1]) if ids is not None else torch.iinfo(torch.int64).max
