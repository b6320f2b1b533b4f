"""rotary: reference and Triton program against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_checks import LOW_PRECISION, WAYS, as_leaf, check, evaluate, random, run
from oslo_engine.errors import UnsupportedError
from oslo_engine.kernels.dispatch import KernelInputError
from oslo_engine.kernels.rotary import rotary

NAME = "rotary.rotary"


def angles(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    turns = random(*shape, seed=7, grad=False) * 3
    return turns.cos().to(dtype), turns.sin().to(dtype)


def formula(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Products of complex numbers."""
    half = cos.shape[-1]
    if interleaved:
        pairs = torch.complex(x[..., 0 : 2 * half : 2].contiguous(), x[..., 1 : 2 * half : 2].contiguous())
    else:
        pairs = torch.complex(x[..., :half].contiguous(), x[..., half : 2 * half].contiguous())
    turned = pairs * torch.complex(cos.contiguous(), sin.contiguous())
    y = torch.stack((turned.real, turned.imag), -1).flatten(-2) if interleaved else torch.cat((turned.real, turned.imag), -1)
    return torch.cat((y, x[..., 2 * half :]), -1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "half"), [(16, 8), (16, 4), (20, 10), (21, 5), (2, 1), (96, 48), (3, 0), (1, 0)], ids=str)
def test_rotation_is_the_formula(way: str, interleaved: bool, width: int, half: int) -> None:
    check(way, NAME, formula, [random(2, 3, 7, width), *angles(2, 1, 7, half), interleaved])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("leading", [(), (5,), (1, 5), (4, 5), (3, 1, 5), (2, 1, 1, 5)], ids=str)
def test_tables_broadcast(way: str, leading: tuple[int, ...]) -> None:
    check(way, NAME, formula, [random(2, 3, 4, 5, 12), *angles(*leading, 6)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_low_precision_is_rounded_once(way: str, interleaved: bool, dtype: torch.dtype) -> None:
    check(way, NAME, formula, [random(2, 3, 16, dtype=dtype), *angles(3, 8), interleaved])
    check(way, NAME, formula, [random(2, 3, 16, dtype=dtype), *angles(3, 6, dtype=dtype), interleaved])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_strides_do_not_matter(way: str, layout: str) -> None:
    tables = [torch.cat((table, table), -1)[..., :8] for table in angles(2, 1, 5, 8)]
    every_other = [table.repeat_interleave(2, -1)[..., ::2] for table in angles(5, 8)]
    heads = random(2, 5, 3 * 16)
    for view in (
        heads.view(2, 5, 3, 16).transpose(1, 2),
        random(16, 5, 3, 2).permute(3, 2, 1, 0),
        random(16).expand(2, 3, 5, 16),
    ):
        check(way, NAME, formula, [as_leaf(view), *tables], layout=layout)
        check(way, NAME, formula, [as_leaf(view), *every_other, True], layout=layout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (3, 4, 0)], ids=str)
def test_nothing_in_nothing_out(way: str, shape: tuple[int, ...]) -> None:
    outputs, grads = run(way, evaluate, NAME, [random(*shape), *angles(shape[1], shape[2] // 2)])
    assert outputs[0].shape == grads[0].shape == shape


def test_reference_gradients_are_exact() -> None:
    x, tables = random(2, 3, 7, dtype=torch.float64), angles(3, 2, dtype=torch.float64)
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(lambda x, way=interleaved: rotary(x, *tables, way), x)
        assert torch.autograd.gradgradcheck(lambda x, way=interleaved: rotary(x, *tables, way), x)


def test_op_is_well_formed() -> None:
    x = as_leaf(random(2, 8, 3, dtype=torch.bfloat16).transpose(1, 2))
    torch.library.opcheck(torch.ops.oslo_engine.rotary.default, (x, *angles(3, 3), False, False))


def test_learned_angles_are_refused() -> None:
    cos, sin = angles(3, 4)
    with pytest.raises(UnsupportedError, match="no gradient of cos and sin"):
        rotary(random(2, 3, 8), cos.requires_grad_(), sin)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_inputs_are_refused(device: str) -> None:
    x, table = torch.zeros(2, 3, 8, device=device), torch.zeros(3, 4, device=device)
    for cos, sin in (
        (table, table[:1]),
        (table[:2], table[:2]),
        (table.new_zeros(3, 5), table.new_zeros(3, 5)),
        (table[None, None], table[None, None]),
        (table.new_zeros(4, 3, 4), table.new_zeros(4, 3, 4)),
    ):
        with pytest.raises(KernelInputError, match="kernel rotary"):
            rotary(x, cos, sin)
    with pytest.raises(KernelInputError, match="kernel rotary"):
        rotary(x.int(), table, table)
