"""bias_gelu: reference and Triton programs against fp64."""

from __future__ import annotations

from math import pi, sqrt

import pytest
import torch
from torch import Tensor

from kernel_checks import LOW_PRECISION, WAYS, as_leaf, assert_close, check, evaluate, random, run
from oslo_engine.kernels.bias_gelu import bias_gelu
from oslo_engine.kernels.dispatch import KernelInputError

NAME = "bias_gelu.bias_gelu"
FORMS = ["erf", "tanh", "quick"]


def formula(x: Tensor, bias: Tensor | None = None, form: str = "erf") -> Tensor:
    x = x if bias is None else x + bias
    if form == "erf":
        return x * (1 + torch.erf(x / sqrt(2))) / 2
    if form == "tanh":
        return 0.5 * x * (1 + torch.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
    return x / (1 + torch.exp(-1.702 * x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(2, 3, 40), (7, 1), (64,), (9, 1030)], ids=str)
def test_gelu_is_the_formula(way: str, form: str, shape: tuple[int, ...]) -> None:
    check(way, NAME, formula, [random(*shape), random(shape[-1], seed=1), form])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_bias_is_optional(way: str, form: str) -> None:
    check(way, NAME, formula, [random(5, 12), None, form])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_low_precision_is_rounded_once(way: str, form: str, dtype: torch.dtype) -> None:
    check(way, NAME, formula, [random(6, 48, dtype=dtype), random(48, dtype=dtype, seed=1), form])
    check(way, NAME, formula, [random(6, 48, dtype=dtype), random(48, seed=1), form])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_strides_do_not_matter(way: str, layout: str) -> None:
    bias = as_leaf(random(20, 2, seed=1)[:, 0])
    for view in (random(20, 3, 4).permute(2, 1, 0), random(4, 5, 50)[:, 1:4, 7:27], random(4, 1, 20).expand(4, 3, 20)):
        check(way, NAME, formula, [as_leaf(view), bias], layout=layout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
def test_nothing_in_nothing_out(way: str, shape: tuple[int, ...]) -> None:
    outputs, grads = run(way, evaluate, NAME, [random(*shape), random(shape[-1])])
    assert outputs[0].shape == grads[0].shape == shape
    assert grads[1].tolist() == [0.0] * shape[-1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_far_from_zero_it_is_zero_or_x(way: str, form: str) -> None:
    outputs, grads = run(way, evaluate, NAME, [as_leaf(torch.tensor([[-1e4, 1e4, 0.0]])), None, form])
    assert_close(outputs[0], torch.tensor([[0.0, 1e4, 0.0]]))
    assert grads[0].isfinite().all()
    assert grads[0][0, 0] == 0


@pytest.mark.parametrize("form", FORMS)
def test_reference_gradients_are_exact(form: str) -> None:
    arguments = [random(3, 5, dtype=torch.float64), random(5, seed=1, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda x, bias: bias_gelu(x, bias, form), arguments)


def test_ops_are_well_formed() -> None:
    ops = torch.ops.oslo_engine
    x = as_leaf(random(8, 3, dtype=torch.bfloat16).t())
    torch.library.opcheck(ops.bias_gelu.default, (x, random(8), "tanh"))
    torch.library.opcheck(ops.bias_gelu_backward.default, (x.detach(), x.detach(), None, "erf", True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_inputs_are_refused(device: str) -> None:
    x = torch.zeros(2, 4, device=device)
    for call in (lambda: bias_gelu(x, x[0, :3]), lambda: bias_gelu(x.int()), lambda: bias_gelu(x, None, "sigmoid")):
        with pytest.raises(KernelInputError, match="kernel bias_gelu"):
            call()
