"""Optimizers that would do something else on slices are told from those that would not, by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from oslo_engine.rewrite.entrywise import works_entrywise

CPU = torch.device("cpu")


class Lamb(torch.optim.Optimizer):
    """The norm of a whole weight decides how far it moves."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.norm() / parameter.grad.norm() * parameter.grad


class ClippingSgd(torch.optim.SGD):
    """The norm of all its gradients together decides."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter) * parameter.grad.norm()
        super().step()


class Unbuildable(torch.optim.SGD):
    def __init__(self, params: Any, inner: Callable[[], Any]) -> None:
        super().__init__(params, lr=inner())


def asked(optimizer: torch.optim.Optimizer, *, tp: bool = True, pp: bool = False) -> bool | None:
    return works_entrywise(optimizer, optimizer.param_groups[0], CPU, tp=tp, pp=pp)


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


@pytest.mark.parametrize(
    "kind", ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]
)
def test_an_optimizer_that_works_entry_by_entry_is_let_be(kind: str) -> None:
    assert asked(getattr(torch.optim, kind)(weights()), pp=True) is True


@pytest.mark.parametrize("options", [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1, "lr": 0.0}, {"foreach": True}])
def test_options_of_an_optimizer_do_not_matter_to_the_question(options: dict[str, Any]) -> None:
    assert asked(torch.optim.SGD(weights(), **options), pp=True) is True


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adafactor,
        torch.optim.Muon,
        torch.optim.LBFGS,
        lambda p: torch.optim.Adafactor(p, lr=0.0),  # as at the start of a warm-up
        transformers.Adafactor,
        lambda p: transformers.Adafactor(p, lr=0.01, relative_step=False, scale_parameter=False),
        Lamb,
        ClippingSgd,
    ],
)
def test_an_optimizer_that_looks_at_whole_matrices_is_found_out(make: Any) -> None:
    assert asked(make(weights())) is False


def test_in_a_pipeline_only_what_joins_parameters_matters() -> None:
    assert asked(torch.optim.Muon(weights()), tp=False, pp=True) is True
    assert asked(torch.optim.LBFGS(weights()), tp=False, pp=True) is False
    assert asked(ClippingSgd(weights()), tp=False, pp=True) is False


def test_what_cannot_be_tried_is_left_open() -> None:
    assert asked(Noisy(weights())) is None
    assert asked(Unbuildable(weights(), lambda: 0.1)) is None


def test_asking_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    asked(Noisy(weights(), lr=0.2))
    assert torch.equal(torch.get_rng_state(), before)
