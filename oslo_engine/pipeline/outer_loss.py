"""A loss that is computed from what the model returns, and not by the model: Trainer has two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

LABELS, COUNT = "labels", "num_items_in_batch"


@dataclass(frozen=True)
class OuterLoss:
    """Where there is one, the model is called without labels on every stage, and the last stage computes it.

    compute: (output of the model, labels, num_items_in_batch or None) -> a scalar.
    shift_labels: whether it compares position t with the label at t + 1.
    divides_by_count: whether it is a sum divided by ``num_items_in_batch`` where that is given; else it is a mean over labels
        other than -100.
    """

    compute: Callable[[Any, Tensor, Any], Tensor]
    shift_labels: bool
    divides_by_count: bool


def without_labels(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in (LABELS, COUNT)}
