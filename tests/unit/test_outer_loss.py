"""How a loss from outside of a model is put together from micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import small_models
from oslo_engine.errors import UnsupportedError
from oslo_engine.pipeline.loss_check import outer_loss
from oslo_engine.rewrite.skeleton import skeleton


def twin_of(name: str) -> Any:
    cls, config, _ = getattr(small_models, name)()
    return skeleton(cls, config).train()


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_sums_and_means_are_told_apart_and_whether_labels_are_shifted(name: str, reduction: str, shifts: bool) -> None:
    def compute(output: Any, labels: Tensor, count: Tensor) -> Tensor:
        logits, targets = (output.logits[:, :-1], labels[:, 1:]) if shifts else (output.logits, labels)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        return loss / count if reduction == "sum" else loss

    found = outer_loss(twin_of(name), compute)
    assert found.divides_by_count == (reduction == "sum")
    assert found.divides_by_count or found.shift_labels == shifts


def mean_of_rows(output: Any, labels: Tensor, count: Tensor) -> Tensor:
    losses = F.cross_entropy(output.logits.transpose(1, 2), labels, reduction="none")
    return (losses.sum(1) / (labels != -100).sum(1)).mean()


@pytest.mark.parametrize(
    "compute",
    [
        mean_of_rows,
        lambda output, labels, count: output.logits.square().mean(),
        lambda output, labels, count: output.logits.sum() ** 2,
        lambda output, labels, count: output.loss,
        lambda output, labels, count: torch.tensor(float("nan")),
    ],
)
def test_what_micro_batches_do_not_add_up_to_is_refused(compute: Any) -> None:
    with pytest.raises(UnsupportedError, match="put together from micro-batches"):
        outer_loss(twin_of("gpt2"), compute)
