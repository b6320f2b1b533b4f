"""Losses over a vocabulary cut over real ranks: the number, the gradient and the collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from oslo_engine.comm.counter import CollectiveCounter
from oslo_engine.layers import vocab_reductions
from split_vocab import assert_close, split_logits, tp_axis

VOCABULARY = 131  # a prime: no tp divides it
BATCH, LENGTH = 3, 7
NUM_TARGETS = BATCH * LENGTH

Loss = Callable[[Tensor, Tensor], Tensor]


def left_padded(labels: Tensor) -> Tensor:
    labels = labels.clone()
    for row, padding in enumerate((0, 2, 5)):
        labels[row, :padding] = -100
    return labels


def one_loss(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), **options)


def ignoring_id_0(logits: Tensor, labels: Tensor) -> Tensor:
    return one_loss(logits, labels.clamp(min=0), ignore_index=0)


def class_dim_one(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, **options)


def negative_log_likelihood(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    log_probs = F.log_softmax(logits, dim=-1)
    return F.nll_loss(log_probs.view(-1, VOCABULARY), labels.view(-1), **options)


def t5_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.CrossEntropyLoss(ignore_index=-100)(logits.view(-1, logits.size(-1)), labels.view(-1))


def older_causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = logits[..., :-1, :].contiguous()
    return torch.nn.CrossEntropyLoss()(shifted.view(-1, VOCABULARY), labels[..., 1:].contiguous().view(-1))


def trainer_label_smoothing(logits: Tensor, labels: Tensor, **options: object) -> Tensor:
    return LabelSmoother(epsilon=0.1)({"logits": logits}, labels, **options)


def perplexity_weighted(logits: Tensor, labels: Tensor) -> Tensor:
    """No reduction, a gradient that differs per target, and a second use of the logits."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    weights = torch.linspace(0.5, 2, NUM_TARGETS, dtype=losses.dtype)
    return (losses * weights).sum() + 1e-2 * logits.logsumexp(-1).square().mean()


LOSSES: dict[str, Loss] = {
    **{f"cross entropy, {reduction}": partial(one_loss, reduction=reduction) for reduction in ("none", "sum", "mean")},
    "cross entropy, ignoring id 0": ignoring_id_0,
    "label smoothing": partial(one_loss, label_smoothing=0.1),
    "label smoothing, none": partial(one_loss, label_smoothing=0.3, reduction="none"),
    "classes in dim 1": partial(class_dim_one, label_smoothing=0.1),
    "log_softmax and nll, mean": negative_log_likelihood,
    "log_softmax and nll, sum": partial(negative_log_likelihood, reduction="sum"),
    "causal": partial(ForCausalLMLoss, vocab_size=VOCABULARY),
    "causal, num_items_in_batch": partial(ForCausalLMLoss, vocab_size=VOCABULARY, num_items_in_batch=torch.tensor(40)),
    "masked": partial(ForMaskedLMLoss, vocab_size=VOCABULARY),
    "masked, num_items_in_batch": partial(ForMaskedLMLoss, vocab_size=VOCABULARY, num_items_in_batch=29),
    "t5": t5_loss,
    "older causal": older_causal_loss,
    "trainer label smoothing": trainer_label_smoothing,
    "trainer label smoothing, shifted, num_items": partial(trainer_label_smoothing, shift_labels=True, num_items_in_batch=33),
    "weighted with z-loss": perplexity_weighted,
}
LABELS: dict[str, Callable[[Tensor], Tensor]] = {
    "all labels": lambda labels: labels,
    "left padding": left_padded,
    "no labels": lambda labels: torch.full_like(labels, -100),
}


def make_batch(dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    logits = 3 * torch.randn(BATCH, LENGTH, VOCABULARY, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH))
    labels[-1, -3:] = torch.tensor([0, VOCABULARY // 2, VOCABULARY - 1])
    return logits.to(dtype), LABELS[kind](labels)


TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-12, 1e-12)}  # loss, gradient


def check_against_whole(kind: str, dtype: torch.dtype) -> None:
    axis = tp_axis()
    logits, labels = make_batch(dtype, kind)
    for name, loss in LOSSES.items():
        whole = logits.double().requires_grad_()
        leaf, shard = split_logits(logits, axis)
        expected, got = loss(whole, labels), loss(shard, labels)
        assert got.dtype == loss(logits, labels).dtype, name
        # Transformers' losses compute in fp32 whatever they get, LabelSmoother in part.
        loss_tolerance, grad_tolerance = TOLERANCES[torch.float32 if "trainer" in name else got.dtype]
        assert_close(got, expected, loss_tolerance, f"{name}, loss")
        (expected_grad,) = torch.autograd.grad(expected.sum(), whole)
        (grad,) = torch.autograd.grad(got.sum(), leaf)
        assert_close(grad, shard.vocab.narrow(expected_grad), grad_tolerance, f"{name}, gradient")


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("tp", [2, 3])
def test_every_loss_and_its_gradient_equal_the_whole_vocabulary(rank_pool, tp, kind):
    rank_pool(tp).run(check_against_whole, kind, torch.float64)
    rank_pool(tp).run(check_against_whole, kind, torch.float32)


def test_losses_are_right_at_tp_4(rank_pool):
    rank_pool(4).run(check_against_whole, "left padding", torch.float64)


def check_in_small_pieces() -> None:
    vocab_reductions.PIECE_ELEMENTS, before = 100, vocab_reductions.PIECE_ELEMENTS
    try:
        check_against_whole("left padding", torch.float64)
    finally:
        vocab_reductions.PIECE_ELEMENTS = before


def test_working_in_pieces_changes_nothing(rank_pool):
    rank_pool(2).run(check_in_small_pieces)


def check_half_precision(dtype: torch.dtype) -> None:
    """The split loss may not be further from fp64 than the unsplit one (twice, for rounding's luck)."""
    axis = tp_axis()
    logits, labels = make_batch(dtype, "left padding")
    for name in ("causal", "masked", "t5", "label smoothing", "trainer label smoothing"):
        exact, unsplit = logits.double().requires_grad_(), logits.clone().requires_grad_()
        leaf, shard = split_logits(logits, axis)
        results = [LOSSES[name](tensor, labels) for tensor in (exact, unsplit, shard)]
        assert results[2].dtype == results[1].dtype, name
        for result in results:
            result.backward()
        vocab = shard.vocab
        pairs = ((results[1], results[2], results[0]), (vocab.narrow(unsplit.grad), leaf.grad, vocab.narrow(exact.grad)))
        for of_unsplit, of_split, truth in pairs:
            allowed = 2 * (of_unsplit.double() - truth).abs().max() + 5e-7 * truth.abs().max()
            assert (of_split.double() - truth).abs().max() <= allowed, name
        assert leaf.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_as_exact_as_unsplit(rank_pool, dtype):
    rank_pool(2).run(check_half_precision, dtype)


def check_autocast() -> None:
    axis = tp_axis()
    logits, labels = make_batch(torch.bfloat16, "all labels")
    with torch.autocast("cpu", torch.bfloat16):
        leaf, shard = split_logits(logits, axis)
        loss = one_loss(shard, labels)
        assert loss.dtype == one_loss(logits, labels).dtype == torch.float32
    assert_close(loss, one_loss(logits.double(), labels), 1e-5)
    loss.backward()
    assert leaf.grad.dtype == torch.bfloat16


def test_autocast_gives_an_fp32_loss(rank_pool):
    rank_pool(2).run(check_autocast)


def check_extreme_logits() -> None:
    axis = tp_axis()
    for shift in (-1e4, 1e4):
        logits, labels = make_batch(torch.float32, "all labels")
        logits = logits + shift
        leaf, shard = split_logits(logits, axis)
        loss = one_loss(shard, labels)
        assert_close(loss, one_loss(logits.double(), labels), 1e-5)
        loss.backward()
        assert leaf.grad.isfinite().all()
    masked = logits.index_fill(-1, torch.arange(90, VOCABULARY), -torch.inf)  # on some ranks nothing is left
    labels = labels % 90
    leaf, shard = split_logits(masked, axis)
    loss = one_loss(shard, labels)
    assert_close(loss, one_loss(masked.double(), labels), 1e-5)
    loss.backward()
    assert leaf.grad.isfinite().all()


def test_huge_and_masked_logits_stay_finite(rank_pool):
    rank_pool(3).run(check_extreme_logits)


def count_collectives(name: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    logits, labels = make_batch(torch.float32, "left padding")
    _, shard = split_logits(logits, tp_axis())
    with CollectiveCounter() as forward:
        loss = LOSSES[name](shard, labels)
    with CollectiveCounter() as backward:
        loss.backward()
    return forward.calls, backward.calls


@pytest.mark.parametrize(
    ("name", "num_forward", "num_backward"),
    [
        ("causal", 3, 0),
        ("causal, num_items_in_batch", 3, 0),
        ("t5", 3, 0),
        ("label smoothing", 4, 0),
        ("log_softmax and nll, mean", 3, 1),
        ("trainer label smoothing", 4, 1),
    ],
)
def test_collectives_of_a_loss(rank_pool, name, num_forward, num_backward):
    row_bytes = NUM_TARGETS * 4
    for forward, backward in rank_pool(2).run(count_collectives, name):
        assert forward == {"allreduce": [num_forward, num_forward * row_bytes]}
        assert backward == ({"allreduce": [num_backward, num_backward * row_bytes]} if num_backward else {})


def check_out_of_range_targets() -> None:
    logits, labels = make_batch(torch.float32, "left padding")
    _, shard = split_logits(logits, tp_axis())
    for wrong in (VOCABULARY, -1, -101):
        labels[1, 4] = wrong
        with pytest.raises(IndexError, match=f"target {wrong} is out of range for a vocabulary of {VOCABULARY}"):
            one_loss(shard, labels)


def test_targets_outside_the_vocabulary_raise_on_every_rank(rank_pool):
    rank_pool(2).run(check_out_of_range_targets)


def check_saved_memory(name: str) -> int:
    """Bytes kept for the backward, beyond the logits themselves and small things."""
    logits, labels = make_batch(torch.bfloat16, "left padding")
    leaf, shard = split_logits(logits, tp_axis())
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = LOSSES[name](shard, labels)
    kept.pop(leaf.untyped_storage().data_ptr())
    assert loss.dtype == torch.float32
    return sum(kept.values())


def test_the_loss_of_bf16_logits_keeps_no_second_copy_of_them(rank_pool):
    for kept in rank_pool(2).run(check_saved_memory, "causal"):
        assert kept <= NUM_TARGETS * 64


def check_checkpointed(kind: str) -> None:
    from torch.utils.checkpoint import checkpoint

    axis = tp_axis()
    logits, labels = make_batch(torch.float64, kind)
    leaf, shard = split_logits(logits, axis)
    for loss in (one_loss, negative_log_likelihood):
        (expected,) = torch.autograd.grad(loss(shard * 2, labels), leaf, retain_graph=True)
        recomputed = checkpoint(lambda part, loss=loss: loss(part * 2, labels), shard, use_reentrant=False)
        (grad,) = torch.autograd.grad(recomputed, leaf, retain_graph=True)
        assert torch.equal(grad, expected)


def test_a_loss_can_be_recomputed(rank_pool):
    rank_pool(2).run(check_checkpointed, "left padding")
