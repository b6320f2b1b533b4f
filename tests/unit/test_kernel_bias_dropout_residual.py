"""bias_dropout_residual: reference and Triton programs against fp64, and both against an independent Philox."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_checks import LOW_PRECISION, WAYS, as_leaf, check, evaluate, random, run
from oslo_engine.kernels.bias_dropout_residual import bias_dropout_residual
from oslo_engine.kernels.dispatch import KernelInputError
from oslo_engine.kernels.philox import random_bits

NAME = "bias_dropout_residual.bias_dropout_residual"


def philox(seed: int, counter: int) -> list[int]:
    """Random123's philox4x32-10 in Python integers."""
    low = 2**32 - 1
    c, k = [counter & low, counter >> 32, 0, 0], [seed & low, seed >> 32 & low]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & low, first >> 32 ^ c[3] ^ k[1], first & low]
        k = [k[0] + 0x9E3779B9 & low, k[1] + 0xBB67AE85 & low]
    return c


def mask_of(shape: torch.Size, seed: int, p: float, offset: int) -> Tensor:
    rows, length = shape[:-1].numel(), shape[-1]
    groups = (length + 3) // 4
    words = [philox(seed, offset + row * groups + col // 4)[col % 4] for row in range(rows) for col in range(length)]
    return torch.tensor([word >= p * 2**32 for word in words]).view(shape)


def formula(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    y = x if bias is None else x + bias
    if training and p > 0:
        y = y * 0 if p == 1 else y * mask_of(x.shape, int(seed), p, offset) / (1 - p)
    return y if residual is None else y + residual


def seed_of(value: int = 1234567890123) -> Tensor:
    return torch.tensor(value)


def test_philox_is_that_of_random123() -> None:
    """Its known answer for zeros, then seeds and counters that use all bits."""
    assert random_bits(torch.tensor(0), torch.tensor([0])).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    for seed in (1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF):
        counters = [0, 1, 2**32 - 1, 2**32, 2**62 + 12345]
        found = random_bits(torch.tensor(seed), torch.tensor(counters))
        assert found.tolist() == [philox(seed & 2**64 - 1, counter) for counter in counters]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(2, 3, 40), (7, 1), (5, 6), (64,), (3, 1030), (9, 300)], ids=str)
def test_result_is_the_formula(way: str, p: float, shape: tuple[int, ...]) -> None:
    arguments = [random(*shape), random(shape[-1], seed=1), random(*shape, seed=2), p, True, seed_of()]
    check(way, NAME, formula, arguments)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("offset", [1, 2**31, 2**32 - 2, 2**40])
def test_every_seed_and_offset(way: str, seed: int, offset: int) -> None:
    def wrapped(x: Tensor, bias: None, residual: None, p: float, training: bool, seed: Tensor, offset: int) -> Tensor:
        return formula(x, bias, residual, p, training, seed, offset)

    check(way, NAME, wrapped, [random(3, 11), None, None, 0.3, True, seed_of(seed), offset])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_bias_and_residual_are_optional(way: str, p: float) -> None:
    for bias in (None, random(12, seed=1)):
        for residual in (None, random(4, 12, seed=2)):
            check(way, NAME, formula, [random(4, 12), bias, residual, p, True, seed_of()])


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_dropped_outside_training(way: str) -> None:
    check(way, NAME, formula, [random(4, 12), random(12, seed=1), random(4, 12, seed=2), 0.9, False])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_low_precision_is_rounded_once(way: str, dtype: torch.dtype) -> None:
    x = random(6, 48, dtype=dtype)
    check(way, NAME, formula, [x, random(48, dtype=dtype, seed=1), random(6, 48, dtype=dtype, seed=2), 0.3, True, seed_of()])
    wider = [x, random(48, seed=1), random(6, 48, seed=2), 0.3, True, seed_of()]
    check(way, NAME, formula, wider, dtypes=[torch.float32])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_strides_do_not_matter(way: str, layout: str) -> None:
    extra = [as_leaf(random(20, 2, seed=1)[:, 0]), as_leaf(random(20, 3, 4, seed=2).permute(2, 1, 0)), 0.4, True, seed_of()]
    for view in (random(20, 3, 4).permute(2, 1, 0), random(4, 5, 50)[:, 1:4, 7:27], random(4, 1, 20).expand(4, 3, 20)):
        check(way, NAME, formula, [as_leaf(view), *extra], layout=layout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
def test_nothing_in_nothing_out(way: str, shape: tuple[int, ...]) -> None:
    arguments = [random(*shape), random(shape[-1]), random(*shape, seed=1), 0.5, True, seed_of()]
    outputs, grads = run(way, evaluate, NAME, arguments)
    assert outputs[0].shape == grads[0].shape == grads[2].shape == shape
    assert grads[1].tolist() == [0.0] * shape[-1]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_dropped_leaves_no_trace(way: str) -> None:
    """Not even of infinities."""
    x = as_leaf(torch.full((2, 8), torch.inf))
    outputs, grads = run(way, evaluate, NAME, [x, None, random(2, 8, grad=False), 1.0])
    assert torch.equal(outputs[0], random(2, 8))
    assert grads[0].eq(0).all()


def test_share_that_is_kept() -> None:
    for p in (0.1, 0.5, 0.9):
        y = bias_dropout_residual(torch.ones(1000, 40), p=p)
        assert abs(y.ne(0).double().mean().item() - (1 - p)) < 0.01
        assert abs(y.mean().item() - 1) < 0.05


def test_seed_comes_from_the_ambient_generator() -> None:
    def draw() -> Tensor:
        return bias_dropout_residual(torch.ones(4, 40), p=0.5)

    torch.manual_seed(0)
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)


def test_recomputation_redraws_the_mask() -> None:
    from torch.utils.checkpoint import checkpoint

    x = random(4, 40)
    torch.manual_seed(0)
    plain = torch.autograd.grad(bias_dropout_residual(x * 2, p=0.5).square().sum(), x)[0]
    torch.manual_seed(0)
    again = checkpoint(lambda x: bias_dropout_residual(x * 2, p=0.5).square().sum(), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, x)[0], plain)


def test_offsets_draw_other_masks() -> None:
    x, seed = torch.ones(4, 40), seed_of()
    masks = [bias_dropout_residual(x, p=0.5, seed=seed, offset=offset).ne(0) for offset in (0, 40)]
    assert 0.3 < (masks[0] == masks[1]).double().mean() < 0.7


def test_reference_gradients_are_exact() -> None:
    wide = {"dtype": torch.float64}
    arguments = [random(3, 5, **wide), random(5, seed=1, **wide), random(3, 5, seed=2, **wide)]
    for p in (0.0, 0.4, 1.0):
        assert torch.autograd.gradcheck(lambda *each, p=p: bias_dropout_residual(*each, p, True, seed_of()), arguments)


def test_ops_are_well_formed() -> None:
    ops = torch.ops.oslo_engine
    x = as_leaf(random(8, 3, dtype=torch.bfloat16).t())
    torch.library.opcheck(ops.bias_dropout_residual.default, (x, random(8), random(3, 8, seed=1), seed_of(), 0.4, 3))
    torch.library.opcheck(ops.bias_dropout_residual.default, (x, None, None, None, 0.0, 0))
    torch.library.opcheck(ops.bias_dropout_residual_backward.default, (x.detach(), seed_of(), 0.4, 3, True))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_inputs_are_refused(device: str) -> None:
    x = torch.zeros(2, 4, device=device)
    for call in (
        lambda: bias_dropout_residual(x.int()),
        lambda: bias_dropout_residual(x, x[0, :3]),
        lambda: bias_dropout_residual(x, None, x[:1]),
        lambda: bias_dropout_residual(x, p=1.5),
        lambda: bias_dropout_residual(x, p=-0.1),
        lambda: bias_dropout_residual(x, seed=torch.zeros(1, dtype=torch.int64, device=device)),
        lambda: bias_dropout_residual(x, seed=torch.zeros((), device=device)),
        lambda: torch.ops.oslo_engine.bias_dropout_residual(x, None, None, None, 0.5, 0),
    ):
        with pytest.raises(KernelInputError, match="kernel bias_dropout_residual"):
            call()
