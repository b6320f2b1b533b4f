"""glu, swiglu and geglu: reference and Triton programs against fp64."""

from __future__ import annotations

from math import pi, sqrt

import pytest
import torch
from torch import Tensor

from kernel_checks import LOW_PRECISION, WAYS, as_leaf, check, evaluate, random, run
from oslo_engine.kernels.dispatch import KernelInputError
from oslo_engine.kernels.glu import glu, swiglu

FORMS = ["silu", "erf", "tanh", "quick"]


def formula(gate: Tensor, up: Tensor, form: str) -> Tensor:
    if form == "erf":
        return gate * (1 + torch.erf(gate / sqrt(2))) / 2 * up
    if form == "tanh":
        return 0.5 * gate * (1 + torch.tanh(sqrt(2 / pi) * (gate + 0.044715 * gate**3))) * up
    return gate / (1 + torch.exp(-{"silu": 1.0, "quick": 1.702}[form] * gate)) * up


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(2, 3, 40), (7, 1), (64,), (9, 1030)], ids=str)
def test_unit_is_the_formula(way: str, form: str, shape: tuple[int, ...]) -> None:
    check(way, "glu.glu", formula, [random(*shape), random(*shape, seed=1), form])


@pytest.mark.parametrize("way", WAYS)
def test_named_units(way: str) -> None:
    arguments = [random(3, 8), random(3, 8, seed=1)]
    check(way, "glu.swiglu", lambda gate, up: formula(gate, up, "silu"), arguments)
    check(way, "glu.geglu", lambda gate, up: formula(gate, up, "erf"), arguments)
    check(way, "glu.geglu", formula, [*arguments, "tanh"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_low_precision_is_rounded_once(way: str, form: str, dtype: torch.dtype) -> None:
    check(way, "glu.glu", formula, [random(6, 48, dtype=dtype), random(6, 48, dtype=dtype, seed=1), form])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_strides_do_not_matter(way: str, layout: str) -> None:
    up = as_leaf(random(4, 3, 40, seed=1).chunk(2, -1)[1])
    for view in (random(20, 3, 4).permute(2, 1, 0), random(4, 3, 40).chunk(2, -1)[0], random(4, 1, 20).expand(4, 3, 20)):
        check(way, "glu.glu", formula, [as_leaf(view), up, "silu"], layout=layout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
def test_nothing_in_nothing_out(way: str, shape: tuple[int, ...]) -> None:
    outputs, grads = run(way, evaluate, "glu.glu", [random(*shape), random(*shape), "silu"])
    assert outputs[0].shape == grads[0].shape == grads[1].shape == shape


@pytest.mark.parametrize("form", FORMS)
def test_reference_gradients_are_exact(form: str) -> None:
    arguments = [random(3, 5, dtype=torch.float64), random(3, 5, seed=1, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda gate, up: glu(gate, up, form), arguments)


def test_ops_are_well_formed() -> None:
    ops = torch.ops.oslo_engine
    gate, up = as_leaf(random(8, 3, dtype=torch.bfloat16).t()), random(3, 8, dtype=torch.bfloat16)
    torch.library.opcheck(ops.glu.default, (gate, up, "silu"))
    torch.library.opcheck(ops.glu_backward.default, (up.detach(), gate.detach(), up.detach(), "erf"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_inputs_are_refused(device: str) -> None:
    x = torch.zeros(2, 4, device=device)
    for call in (
        lambda: swiglu(x, x[0]),
        lambda: swiglu(x, x.half()),
        lambda: swiglu(x.int(), x.int()),
        lambda: glu(x, x, "relu"),
    ):
        with pytest.raises(KernelInputError, match="kernel glu"):
            call()
