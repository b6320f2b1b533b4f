"""cross_entropy, and its parts over slices of the vocabulary: reference and Triton programs against fp64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernel_checks import LOW_PRECISION, WAYS, as_leaf, assert_close, check, evaluate, random, run
from oslo_engine.kernels.cross_entropy import cross_entropy, cross_entropy_parts
from oslo_engine.kernels.dispatch import KernelInputError

LOSS, PARTS = "cross_entropy.cross_entropy", "cross_entropy.cross_entropy_parts"


def ids(*shape: int, below: int, seed: int = 9) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def formula(logits: Tensor, target: Tensor, ignore: int = -100, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
    log_probabilities = logits - logits.exp().sum(-1, keepdim=True).log()
    used = target != ignore
    at = torch.where(used, target, 0).long()
    own = -log_probabilities.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    losses = torch.where(used, (1 - smoothing) * own - smoothing * log_probabilities.mean(-1), 0)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / used.sum()}[reduction]


def parts_formula(logits: Tensor, target: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    hit = torch.arange(start, start + logits.shape[-1]) == target.unsqueeze(-1)
    return logits.exp().sum(-1).log(), (logits * hit).sum(-1), logits.sum(-1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(2, 3, 40), (7, 1), (64,), (6, 1030), (2, 5000)], ids=str)
def test_loss_is_the_formula(way: str, smoothing: float, shape: tuple[int, ...]) -> None:
    target = ids(*shape[:-1], below=shape[-1])
    for reduction in ("mean", "sum", "none"):
        check(way, LOSS, formula, [random(*shape), target, -100, smoothing, reduction])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_targets_give_nothing(way: str, smoothing: float) -> None:
    logits, target = random(6, 10), ids(6, below=10)
    target[1], target[4] = 3, -1
    target[0] = 3
    check(way, LOSS, formula, [random(6, 10), torch.where(target == -1, 2, target), 3, smoothing])
    spoilt = as_leaf(logits.detach().index_fill(0, torch.tensor([0, 1]), torch.nan))
    outputs, grads = run(way, evaluate, LOSS, [spoilt, torch.where(target == -1, 2, target), 3, smoothing, "sum"])
    assert outputs[0].isfinite()
    assert grads[0][:2].eq(0).all()
    assert grads[0].isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_mean_of_no_targets_is_nan_as_in_torch(way: str) -> None:
    outputs, _ = run(way, evaluate, LOSS, [random(3, 5, grad=False), torch.full((3,), -100)])
    assert outputs[0].isnan()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64], ids=str)
def test_low_precision_logits_give_fp32_losses(way: str, dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    arguments = [random(6, 50, dtype=dtype), ids(6, below=50).to(target_dtype), -100, 0.1]
    outputs = check(way, LOSS, formula, arguments, dtypes=[torch.float32])
    assert_close(outputs[0], formula(arguments[0].detach().double(), *arguments[1:]))  # not merely to bf16


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_strides_do_not_matter(way: str, layout: str) -> None:
    target = ids(3, 4, below=20).t()
    for view in (random(20, 3, 4).permute(2, 1, 0), random(4, 5, 50)[:, 1:4, 7:27], random(4, 1, 20).expand(4, 3, 20)):
        check(way, LOSS, formula, [as_leaf(view), target, -100, 0.0, "none"], layout=layout)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 7, 13), (3, 5000)], ids=str)
def test_parts_are_the_formula(way: str, shape: tuple[int, ...]) -> None:
    """Targets below, in and above the slice."""
    target = ids(*shape[:-1], below=3 * shape[-1])
    check(way, PARTS, parts_formula, [random(*shape), target, shape[-1]])
    assert {int(each) // shape[-1] for each in ids(2, 7, below=39).flatten()} == {0, 1, 2} or shape[-1] != 13


def test_parts_of_slices_make_the_loss() -> None:
    """Uneven slices, one empty: joined as ranks would join theirs."""
    whole, target = random(6, 23), ids(6, below=23)
    edges = [0, 9, 9, 20, 23]
    slices = pairwise(edges)
    parts = [cross_entropy_parts(whole[:, start:end], target, start) for start, end in slices]
    lse, own, summed = (torch.stack(part) for part in zip(*parts, strict=True))
    losses = lse.logsumexp(0) - 0.9 * own.sum(0) - 0.1 / 23 * summed.sum(0)
    wide = whole.detach().double().requires_grad_()
    right = formula(wide, target, smoothing=0.1, reduction="none")
    assert_close(losses, right)
    assert_close(*(torch.autograd.grad(each.sum(), values)[0] for each, values in ((losses, whole), (right, wide))))


@pytest.mark.parametrize("way", WAYS)
def test_masked_logits_have_no_probability(way: str) -> None:
    """-inf in places, and everywhere in a slice."""
    logits = random(4, 12).detach()
    logits[:, 5:7] = -torch.inf
    logits[2] = -torch.inf
    target = torch.tensor([0, 11, 30, 3])
    outputs, grads = run(way, evaluate, PARTS, [as_leaf(logits), target, 0], "plain", (0, 1))
    assert_close(outputs[0], logits.double().logsumexp(-1))
    assert outputs[0][2] == -torch.inf
    assert grads[0].isfinite().all()
    assert grads[0][:, 5:7].eq(0).all()
    assert grads[0][2].eq(0).all()


@pytest.mark.parametrize("way", WAYS)
def test_nan_logits_give_a_nan_loss(way: str) -> None:
    logits = random(3, 8).detach()
    logits[1, 2] = torch.nan
    outputs, _ = run(way, evaluate, LOSS, [logits, torch.tensor([0, 1, 2]), -100, 0.0, "none"])
    assert outputs[0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("way", WAYS)
def test_large_logits_do_not_overflow(way: str) -> None:
    logits = as_leaf(random(3, 9000).detach() * 10 + 3e4)
    arguments = [logits, ids(3, below=9000)]
    outputs, grads = run(way, evaluate, LOSS, arguments)
    wide = logits.detach().double().requires_grad_()
    right = torch.nn.functional.cross_entropy(wide, arguments[1])
    torch.testing.assert_close(outputs[0].double(), right.detach(), rtol=0, atol=0.01)  # the spacing of fp32 at 3e4 is 0.002
    assert grads[0].isfinite().all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
def test_nothing_in_nothing_out(way: str, shape: tuple[int, ...]) -> None:
    arguments = [random(*shape), torch.zeros(shape[:-1], dtype=torch.int64), 0]
    outputs, grads = run(way, evaluate, PARTS, arguments)
    assert outputs[0].shape == shape[:-1]
    assert outputs[0].eq(-torch.inf).all()
    assert grads[0].shape == shape


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", [-1, 8])
def test_targets_outside_the_vocabulary_are_refused(way: str, target: int) -> None:
    with pytest.raises(IndexError, match=f"target {target} is out of bounds for 8 classes"):
        run(way, evaluate, LOSS, [random(2, 8), torch.tensor([0, target])])


def test_reference_gradients_are_exact() -> None:
    logits, target = random(4, 7, dtype=torch.float64), torch.tensor([0, 6, -100, 3])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, target, label_smoothing=0.1), logits)
    assert torch.autograd.gradcheck(lambda x: cross_entropy_parts(x, target, 2), logits)


def test_ops_are_well_formed() -> None:
    ops = torch.ops.oslo_engine
    logits, target = as_leaf(random(8, 3, dtype=torch.bfloat16).t()), torch.tensor([0, 1, 7])
    torch.library.opcheck(ops.cross_entropy.default, (logits, target, -100, 0.1))
    torch.library.opcheck(ops.cross_entropy_parts.default, (logits, target, 2))
    lse = torch.ones(3)
    torch.library.opcheck(ops.cross_entropy_backward.default, (lse, lse, None, logits.detach(), target, lse, 0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_inputs_are_refused(device: str) -> None:
    logits, target = torch.zeros(2, 4, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for call in (
        lambda: cross_entropy(logits, target[:1]),
        lambda: cross_entropy(logits, target.float()),
        lambda: cross_entropy(logits.int(), target),
        lambda: cross_entropy(logits, target, label_smoothing=1.5),
        lambda: cross_entropy(logits, target, reduction="average"),
        lambda: cross_entropy_parts(logits, target[:1], 0),
    ):
        with pytest.raises(KernelInputError, match="kernel cross_entropy"):
            call()
