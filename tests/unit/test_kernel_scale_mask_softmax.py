"""scale_mask_softmax: reference and Triton programs against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import LOW_PRECISION, WAYS, as_leaf, check, evaluate, random, run
from oslo_engine.errors import UnsupportedError
from oslo_engine.kernels.dispatch import KernelInputError
from oslo_engine.kernels.scale_mask_softmax import scale_mask_softmax

NAME = "scale_mask_softmax.scale_mask_softmax"
ORDER = ("mask", "bias", "alibi_slopes", "sinks", "scale", "causal", "softcap")
DEFAULTS = {"scale": 1.0, "causal": False, "softcap": 0.0}


def formula(
    x: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float,
) -> Tensor:
    """Key by key, with the sink as one more key."""
    queries, keys = torch.arange(x.shape[2])[:, None], torch.arange(x.shape[3])[None, :]
    behind = queries + x.shape[3] - x.shape[2] - keys
    s = x * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s if bias is None else s + bias
    s = s if slopes is None else s - slopes[:, None, None] * behind
    keep = torch.ones(x.shape, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    keep = keep & (behind >= 0) if causal else keep
    keep = keep & (s > -torch.inf)
    weights = torch.where(keep, torch.where(keep, s, 0).exp(), 0)
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks[:, None, None].exp())
    return weights / torch.where(total == 0, 1, total)


def check_softmax(way: str, scores: Tensor, layout: str = "plain", **settings: Any) -> Tensor:
    values = {**DEFAULTS, **settings}
    return check(way, NAME, formula, [scores, *(values.get(key) for key in ORDER)], layout=layout, saved=scores.dtype)[0]


def random_mask(*shape: int, share: float = 0.7) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < share


EXTRAS = {
    "nothing": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": True},
    "padding": {"mask": random_mask(2, 1, 1, 13)},
    "any mask": {"mask": random_mask(2, 3, 5, 13)},
    "mask of two dims": {"mask": random_mask(5, 13)},
    "relative positions": {"bias": random(1, 3, 5, 13, seed=1)},
    "whole bias": {"bias": random(2, 3, 5, 13, seed=1)},
    "bias of keys": {"bias": random(2, 1, 1, 13, seed=1)},
    "bias of queries": {"bias": random(5, 1, seed=1), "sinks": random(3, seed=2)},
    "bias of heads": {"bias": random(3, 1, 1, seed=1), "sinks": random(3, seed=2)},
    "alibi": {"alibi_slopes": random(3, seed=1, grad=False), "causal": True},
    "softcap": {"softcap": 2.0, "scale": 1.5},
    "sinks": {"sinks": random(3, seed=1)},
    "everything": {
        "scale": 0.4,
        "mask": random_mask(2, 1, 5, 13),
        "bias": random(1, 3, 5, 13, seed=1),
        "alibi_slopes": random(3, seed=4, grad=False),
        "sinks": random(3, seed=2),
        "causal": True,
        "softcap": 1.5,
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_probabilities_are_the_formula(way: str, extra: str) -> None:
    check_softmax(way, random(2, 3, 5, 13), **EXTRAS[extra])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(1, 2, 1, 9), (1, 1, 9, 1), (2, 3, 9, 4), (1, 2, 70, 70)], ids=str)
def test_any_number_of_queries_and_keys(way: str, shape: tuple[int, ...]) -> None:
    y = check_softmax(way, random(*shape), causal=True, sinks=None, alibi_slopes=random(shape[1], seed=2, grad=False))
    unseen = max(0, shape[2] - shape[3])
    assert y[:, :, :unseen].eq(0).all()
    torch.testing.assert_close(y[:, :, unseen:].sum(-1), torch.ones(*shape[:2], shape[2] - unseen))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("extra", ["causal", "everything"])
def test_rows_longer_than_a_tile(way: str, extra: str) -> None:
    """By one key, so that the last query sees one more tile than the first."""
    settings = dict(EXTRAS[extra])
    if extra == "everything":
        settings |= {"mask": random_mask(1, 1, 2, 8193), "bias": random(1, 3, 1, 8193, seed=1)}
        settings["alibi_slopes"] = settings["alibi_slopes"] / 1000  # the formula has no maximum to subtract
    check_softmax(way, random(1, 3, 2, 8193), **settings)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("keys", [6, 8193])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_keys_give_zeros(way: str, keys: int, sinks: bool) -> None:
    mask = torch.ones(1, 1, 2, keys, dtype=torch.bool)
    mask[:, :, 0] = False
    extra = {"sinks": random(2, seed=1)} if sinks else {}
    assert check_softmax(way, random(1, 2, 2, keys), mask=mask, **extra)[:, :, 0].eq(0).all()
    closed = torch.zeros(1, 1, 2, keys).masked_fill(~mask, -torch.inf)
    assert check_softmax(way, random(1, 2, 2, keys), bias=closed, **extra)[:, :, 0].eq(0).all()


@pytest.mark.parametrize("way", WAYS)
def test_minus_infinity_and_nan_behind_the_mask(way: str) -> None:
    scores = random(1, 2, 3, 5).detach()
    scores[..., 1] = -torch.inf
    scores[..., 4] = torch.nan
    mask = torch.tensor([True, True, True, True, False])
    for softcap in (0.0, 2.0):
        arguments = [as_leaf(scores), mask, None, None, None, 1.0, False, softcap]
        outputs, grads = run(way, evaluate, NAME, arguments)
        assert outputs[0].isfinite().all()
        assert outputs[0][..., 4].eq(0).all()
        assert grads[0].isfinite().all()
        assert grads[0][..., 4].eq(0).all()


@pytest.mark.parametrize("way", WAYS)
def test_large_scores_do_not_overflow(way: str) -> None:
    y = run(way, evaluate, NAME, [random(1, 1, 2, 9) * 1e4, None, None, None, None, 1.0, False, 0.0])[0][0]
    torch.testing.assert_close(y.sum(-1), torch.ones(1, 1, 2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "extra", sorted(EXTRAS.keys() - {"bias of queries", "bias of heads"})
)  # their sum over keys leaves only rounding
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_low_precision_is_rounded_once(way: str, extra: str, dtype: torch.dtype) -> None:
    check_softmax(way, random(2, 3, 5, 13, dtype=dtype), **EXTRAS[extra])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_strides_do_not_matter(way: str, layout: str) -> None:
    extras = {
        "mask": random_mask(13, 5, 1, 2).permute(3, 2, 1, 0),
        "bias": as_leaf(random(13, 10, 3, 1, seed=1)[:, ::2].permute(3, 2, 1, 0)),
        "sinks": as_leaf(random(3, 2, seed=2)[:, 1]),
    }
    for view in (
        random(13, 5, 3, 2).permute(3, 2, 1, 0),
        random(2, 5, 3, 13).transpose(1, 2),
        random(3, 5, 1).expand(2, 3, 5, 13),
    ):
        check_softmax(way, as_leaf(view), layout, **extras)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
def test_nothing_in_nothing_out(way: str, shape: tuple[int, ...]) -> None:
    bias, sinks = random(1, *shape[1:], seed=1), random(shape[1], seed=2)
    arguments = [random(*shape), None, bias, None, sinks, 1.0, True, 0.0]
    outputs, grads = run(way, evaluate, NAME, arguments)
    assert outputs[0].shape == grads[0].shape == shape
    assert grads[2].shape == bias.shape
    assert grads[2].eq(0).all()
    assert grads[4].tolist() == [0.0] * shape[1]


def test_reference_gradients_are_exact() -> None:
    wide = {"dtype": torch.float64}
    inputs = random(1, 2, 3, 4, **wide), random(2, 1, 4, seed=1, **wide), random(2, seed=2, **wide)
    for softcap in (0.0, 1.5):

        def call(x: Tensor, bias: Tensor, sinks: Tensor, softcap: float = softcap) -> Tensor:
            return scale_mask_softmax(x, bias=bias, sinks=sinks, causal=True, scale=0.7, softcap=softcap)

        assert torch.autograd.gradcheck(call, inputs)


def test_ops_are_well_formed() -> None:
    ops = torch.ops.oslo_engine
    x, mask, bias, slopes, sinks = random(2, 3, 4, 5), random_mask(4, 5), random(3, 1, 5, seed=1), random(3).detach(), random(3)
    strided = as_leaf(x.detach().to(torch.bfloat16).transpose(0, 1).contiguous().transpose(0, 1))
    torch.library.opcheck(ops.scale_mask_softmax.default, (strided, mask, bias, slopes, sinks, 0.5, True, 2.0))
    torch.library.opcheck(ops.scale_mask_softmax.default, (x, None, None, None, None, 0.5, True, 0.0))
    y = x.detach()
    torch.library.opcheck(ops.scale_mask_softmax_backward.default, (y, y, None, y.sum(-1), 0.5, 0.0, [1, 3, 4, 1]))


def test_learned_slopes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="alibi_slopes"):
        scale_mask_softmax(random(1, 2, 3, 4), alibi_slopes=random(2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_inputs_are_refused(device: str) -> None:
    x = torch.zeros(2, 3, 4, 5, device=device)
    for call in (
        lambda: scale_mask_softmax(x[0]),
        lambda: scale_mask_softmax(x.int()),
        lambda: scale_mask_softmax(x, mask=x[:, :, :, :4] > 0),
        lambda: scale_mask_softmax(x, mask=x),
        lambda: scale_mask_softmax(x, bias=x[None]),
        lambda: scale_mask_softmax(x, sinks=x[0, 0, 0]),
        lambda: scale_mask_softmax(x, alibi_slopes=x[0, 0, 0]),
        lambda: scale_mask_softmax(x, softcap=-1.0),
    ):
        with pytest.raises(KernelInputError, match="kernel scale_mask_softmax"):
            call()
