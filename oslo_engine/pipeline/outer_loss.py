"""A loss that is computed from what the model returns, and not by the model: label smoothing in Transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

LABELS = "labels"


@dataclass(frozen=True)
class OuterLoss:
    """In its place the model is called without labels, on every stage.

    compute: (output of the model, labels, num_items_in_batch or None) -> the mean over labels other than -100, or their sum
        divided by ``num_items_in_batch``.
    shift_labels: whether it compares position t with the label at t + 1.
    """

    compute: Callable[[Any, Tensor, Any], Tensor]
    shift_labels: bool


def without_labels(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != LABELS}
