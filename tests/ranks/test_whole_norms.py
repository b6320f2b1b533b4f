"""Norms whose features are cut compute what they compute over all features, however their code spells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_engine.comm.collectives import Axis
from oslo_engine.errors import UnsupportedError
from oslo_engine.layers.norms import whole_norm

SIZE = 12
SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3),
    "mean by name, as a method": lambda x: x - x.mean(dim=-1, keepdim=True),
    "mean without the dimension": lambda x: x - torch.mean(x, x.ndim - 1).unsqueeze(-1),
    "mean in float64": lambda x: x - x.mean(-1, keepdim=True, dtype=torch.float64),
    "sum": lambda x: x / x.abs().sum(-1, True),
    "unbiased variance": lambda x: x / x.var(-1, keepdim=True),
    "biased variance": lambda x: x / x.var(-1, False, True),
    "variance with a correction": lambda x: x / torch.var(x, dim=-1, correction=0, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-3),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-3),
    "another dimension": lambda x: x - x.mean(0, keepdim=True),
}
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "all dimensions": lambda x: x - x.mean(),
    "two dimensions": lambda x: x - x.sum((-2, -1), keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "standard deviation": lambda x: x / x.std(-1, keepdim=True),
}


class Norm(nn.Module):
    def __init__(self, spelled: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.spelled = spelled

    def forward(self, x: Tensor) -> Tensor:
        return self.spelled(x)


def tp_axis() -> Axis:
    return Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def errors_of(name: str) -> tuple[float, float]:
    """Largest error of the output and of the gradient."""
    axis = tp_axis()
    whole = torch.randn(3, 5, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights = torch.randn(3, 5, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted = SPELLINGS[name](whole)
    (wanted * weights).sum().backward()
    cut = slice(axis.rank * SIZE // axis.size, (axis.rank + 1) * SIZE // axis.size)
    ours = whole.detach()[..., cut].clone().requires_grad_()
    got = whole_norm(Norm(SPELLINGS[name]), axis, SIZE)(ours)
    (got * weights[..., cut]).sum().backward()
    assert whole.grad is not None
    assert ours.grad is not None
    return float((got - wanted[..., cut]).abs().max()), float((ours.grad - whole.grad[..., cut]).abs().max())


def refusal_of(name: str) -> str:
    try:
        whole_norm(Norm(REFUSED[name]), tp_axis(), SIZE)(torch.ones(2, 3, SIZE // dist.get_world_size()))
    except UnsupportedError as error:
        return error.what
    return ""


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_gives_the_statistic_of_all_features(rank_pool: Any, name: str) -> None:
    for of_output, of_gradient in rank_pool(3).run(errors_of, name):
        assert of_output < 1e-12
        assert of_gradient < 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_a_statistic_of_some_features_is_refused_on_all_ranks(rank_pool: Any, name: str) -> None:
    for told in rank_pool(2).run(refusal_of, name):
        assert "norm over the features of all ranks" in told
