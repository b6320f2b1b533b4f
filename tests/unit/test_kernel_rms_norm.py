"""rms_norm and add_rms_norm: reference and Triton programs against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import LOW_PRECISION, WAYS, as_leaf, check, evaluate, random, run
from oslo_engine.kernels.dispatch import KernelInputError
from oslo_engine.kernels.rms_norm import add_rms_norm, rms_norm

ALONE, SUM = "rms_norm.rms_norm", "rms_norm.add_rms_norm"


def formula(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, shift: float = 0.0) -> Tensor:
    y = x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5
    return y if weight is None else y * (weight + shift)


def sum_formula(x: Tensor, residual: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    return formula(x + residual, *parameters), x + residual


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 3, 40), (7, 1), (5, 129), (64,), (33, 64)], ids=str)
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_norm_is_the_formula(way: str, shape: tuple[int, ...], shift: float) -> None:
    check(way, ALONE, formula, [random(*shape), random(shape[-1], seed=1), 1e-3, shift])


@pytest.mark.parametrize("way", WAYS)
def test_weight_is_optional(way: str) -> None:
    check(way, ALONE, formula, [random(4, 12)])
    check(way, SUM, sum_formula, [random(4, 12), random(4, 12, seed=1)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_low_precision_is_rounded_once(way: str, dtype: torch.dtype) -> None:
    check(way, ALONE, formula, [random(6, 48, dtype=dtype), random(48, dtype=dtype, seed=1)])
    large = as_leaf(random(6, 48, dtype=dtype) * 300)  # their squares exceed fp16
    check(way, ALONE, formula, [large, random(48, seed=1), 1e-6, 1.0])


@pytest.mark.parametrize("way", WAYS)
def test_sum_has_the_wider_dtype(way: str) -> None:
    arguments = [random(4, 16, dtype=torch.bfloat16), random(4, 16, seed=1), random(16, seed=2)]
    check(way, SUM, sum_formula, arguments, dtypes=[torch.float32] * 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_gradient_of_the_sum_joins_that_of_the_norm(way: str, used: tuple[int, ...]) -> None:
    arguments = [random(5, 24), random(5, 24, seed=1)] + [random(24, seed=2)] * (0 in used)
    check(way, SUM, sum_formula, arguments, used=used)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_strides_do_not_matter(way: str, layout: str) -> None:
    weight = as_leaf(random(20, 2, seed=1)[:, 0])
    for view in (random(20, 3, 4).permute(2, 1, 0), random(4, 5, 50)[:, 1:4, 7:27], random(4, 1, 20).expand(4, 3, 20)):
        check(way, ALONE, formula, [as_leaf(view), weight], layout=layout)
        check(way, SUM, sum_formula, [as_leaf(view), random(4, 3, 20, seed=5), weight, 1e-6, 1.0], layout=layout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [ALONE, SUM])
def test_rows_longer_than_a_tile(way: str, name: str) -> None:
    inputs = [random(3, 8200), random(3, 8200, seed=4)][: 1 + (name == SUM)]
    check(way, name, sum_formula if name == SUM else formula, [*inputs, random(8200, seed=1)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
def test_nothing_in_nothing_out(way: str, shape: tuple[int, ...]) -> None:
    outputs, grads = run(way, evaluate, ALONE, [random(*shape), random(shape[-1])])
    assert outputs[0].shape == grads[0].shape == shape
    assert grads[1].tolist() == [0.0] * shape[-1]


@pytest.mark.parametrize("way", WAYS)
def test_zero_rows_stay_zero(way: str) -> None:
    outputs, grads = run(way, evaluate, ALONE, [as_leaf(torch.zeros(2, 6)), random(6)])
    assert outputs[0].eq(0).all()
    assert grads[0].isfinite().all()


def test_reference_gradients_are_exact() -> None:
    x, residual, weight = (random(*shape, seed=shape[0], dtype=torch.float64) for shape in ((3, 5), (3, 5), (5,)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6, 1.0), (x, weight))
    assert torch.autograd.gradcheck(add_rms_norm, (x, residual, weight))


def test_ops_are_well_formed() -> None:
    ops = torch.ops.oslo_engine
    x = as_leaf(random(8, 3, dtype=torch.bfloat16).t())
    torch.library.opcheck(ops.rms_norm.default, (x, random(8), 1e-5, 0.0))
    torch.library.opcheck(ops.add_rms_norm.default, (x, random(3, 8, seed=1), None, 1e-5, 0.0))
    y, rstd = ops.rms_norm(random(3, 8, grad=False), None, 1e-5, 0.0)
    torch.library.opcheck(ops.rms_norm_backward.default, (y, y, y, None, rstd, 0.0, True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_shapes_are_refused(device: str) -> None:
    x, short = torch.zeros(2, 4, device=device), torch.zeros(3, device=device)
    for call in (lambda: rms_norm(x, short), lambda: rms_norm(x.int()), lambda: add_rms_norm(x, x[:1])):
        with pytest.raises(KernelInputError, match="kernel"):
            call()
