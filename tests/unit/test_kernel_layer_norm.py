"""layer_norm and add_layer_norm: reference and Triton programs against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import LOW_PRECISION, WAYS, as_leaf, check, evaluate, random, run
from oslo_engine.kernels.dispatch import KernelInputError
from oslo_engine.kernels.layer_norm import add_layer_norm, layer_norm

ALONE, SUM = "layer_norm.layer_norm", "layer_norm.add_layer_norm"


def formula(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]
    y = (x - mean) / (variance + eps) ** 0.5
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def sum_formula(x: Tensor, residual: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
    return formula(x + residual, *parameters), x + residual


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 3, 40), (7, 1), (5, 129), (64,), (33, 64)], ids=str)
def test_norm_is_the_formula(way: str, shape: tuple[int, ...]) -> None:
    check(way, ALONE, formula, [random(*shape), random(shape[-1], seed=1), random(shape[-1], seed=2), 1e-3])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parameters", [(None, None), (1, None), (None, 2)], ids=str)
def test_parameters_are_optional(way: str, parameters: tuple[int | None, ...]) -> None:
    given = [None if seed is None else random(12, seed=seed) for seed in parameters]
    check(way, ALONE, formula, [random(4, 12), *given])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_low_precision_is_rounded_once(way: str, dtype: torch.dtype) -> None:
    # With a mean of 30 the squares of bf16 values would lose every digit of the variance.
    x = as_leaf(random(6, 48, dtype=dtype) + 30)
    check(way, ALONE, formula, [x, random(48, dtype=dtype, seed=1), random(48, seed=2)])
    check(way, SUM, sum_formula, [random(6, 48), random(6, 48, dtype=dtype, seed=3), random(48, seed=1), None])


@pytest.mark.parametrize("way", WAYS)
def test_sum_has_the_wider_dtype(way: str) -> None:
    arguments = [random(4, 16, dtype=torch.bfloat16), random(4, 16, seed=1), random(16, seed=2), random(16, seed=3)]
    check(way, SUM, sum_formula, arguments, dtypes=[torch.float32] * 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_gradient_of_the_sum_joins_that_of_the_norm(way: str, used: tuple[int, ...]) -> None:
    arguments = [random(5, 24), random(5, 24, seed=1)]
    if 0 in used:
        arguments += [random(24, seed=2), random(24, seed=3)]
    check(way, SUM, sum_formula, arguments, used=used)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_strides_do_not_matter(way: str, layout: str) -> None:
    parameters = [as_leaf(random(20, 2, seed=1)[:, 0]), random(20, seed=2)]
    for view in (random(20, 3, 4).permute(2, 1, 0), random(4, 5, 50)[:, 1:4, 7:27], random(4, 1, 20).expand(4, 3, 20)):
        check(way, ALONE, formula, [as_leaf(view), *parameters], layout=layout)
        check(way, SUM, sum_formula, [as_leaf(view), random(4, 3, 20, seed=5), *parameters], layout=layout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [ALONE, SUM])
def test_rows_longer_than_a_tile(way: str, name: str) -> None:
    inputs = [random(3, 8200), random(3, 8200, seed=4)][: 1 + (name == SUM)]
    check(way, name, sum_formula if name == SUM else formula, [*inputs, random(8200, seed=1), random(8200, seed=2)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
def test_nothing_in_nothing_out(way: str, shape: tuple[int, ...]) -> None:
    outputs, grads = run(way, evaluate, ALONE, [random(*shape), random(shape[-1]), random(shape[-1])])
    assert outputs[0].shape == grads[0].shape == shape
    assert grads[1].tolist() == grads[2].tolist() == [0.0] * shape[-1]


@pytest.mark.parametrize("way", WAYS)
def test_constant_rows_have_no_direction(way: str) -> None:
    outputs, grads = run(way, evaluate, ALONE, [as_leaf(torch.full((2, 6), 3.0)), random(6)])
    assert outputs[0].eq(0).all()
    assert grads[0].isfinite().all()


def test_reference_gradients_are_exact() -> None:
    wide = {"dtype": torch.float64}
    arguments = [random(3, 5, **wide), random(3, 5, seed=1, **wide), random(5, seed=2, **wide), random(5, seed=3, **wide)]
    assert torch.autograd.gradcheck(lambda x, _, w, b: layer_norm(x, w, b), arguments)
    assert torch.autograd.gradcheck(add_layer_norm, arguments)


def test_ops_are_well_formed() -> None:
    ops = torch.ops.oslo_engine
    x = as_leaf(random(8, 3, dtype=torch.bfloat16).t())
    torch.library.opcheck(ops.layer_norm.default, (x, random(8), random(8, seed=1), 1e-5))
    torch.library.opcheck(ops.add_layer_norm.default, (x, random(3, 8, seed=1), random(8), None, 1e-5))
    y, mean, rstd = ops.layer_norm(random(3, 8, grad=False), None, None, 1e-5)
    torch.library.opcheck(ops.layer_norm_backward.default, (y, y, y, None, mean, rstd, True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_shapes_are_refused(device: str) -> None:
    x, short = torch.zeros(2, 4, device=device), torch.zeros(3, device=device)
    for call in (
        lambda: layer_norm(x, short),
        lambda: layer_norm(x, None, short),
        lambda: layer_norm(x.int()),
        lambda: add_layer_norm(x, x[:1]),
    ):
        with pytest.raises(KernelInputError, match="kernel"):
            call()
