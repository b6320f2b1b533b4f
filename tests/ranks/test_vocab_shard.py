"""Vocabulary-sharded logits over real ranks: reductions, replicated operands, gathering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from oslo_engine.comm.counter import CollectiveCounter
from oslo_engine.layers.vocab_shard import VocabShard, gather_logits
from split_vocab import assert_close, layout_of, split_logits, tp_axis

VOCABULARY = 131
INDEX = torch.tensor([[[0, 1, 130], [65, 66, 43], [44, 87, 88]], [[5, 5, 5], [0, 130, 0], [66, 66, 65]]])


def make_logits() -> Tensor:
    torch.manual_seed(5)
    return 3 * torch.randn(2, 3, VOCABULARY, dtype=torch.float64)


# Results that every rank has whole; the number of all-reduces, forward and backward.
WHOLE: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "sum": (lambda x: x.sum(-1), 1, 0),
    "sum of everything": (lambda x: x.sum(), 1, 0),
    "sum over two dims": (lambda x: x.sum((0, -1), keepdim=True), 1, 0),
    "sum in fp32": (lambda x: x.sum(-1, dtype=torch.float32).double(), 1, 0),
    "mean": (lambda x: x.mean(dim=-1, keepdim=True), 1, 0),
    "mean of everything": (lambda x: x.mean(), 1, 0),
    "mean of a slice": (lambda x: x[..., :40].mean(-1), 1, 0),
    "count": (lambda x: (x > 0).sum(-1), 1, 0),
    "logsumexp": (lambda x: x.logsumexp(-1), 2, 0),
    "logsumexp, kept": (lambda x: torch.logsumexp(x, (-1,), keepdim=True), 2, 0),
    "logsumexp of a slice": (lambda x: x[..., :40].logsumexp(-1), 2, 0),
    "logsumexp of a transposed vocabulary": (lambda x: x.transpose(0, 2).logsumexp(0), 2, 0),
    "argmax": (lambda x: x.argmax(-1), 2, 0),
    "argmax, kept": (lambda x: x.argmax(dim=-1, keepdim=True), 2, 0),
    "argmax of a slice": (lambda x: x[..., :40].argmax(-1), 2, 0),
    "first of equals": (lambda x: x.clamp(max=0.5).argmax(-1), 2, 0),
    "max": (lambda x: x.max(-1).values, 3, 0),
    "max, index": (lambda x: x.max(dim=-1, keepdim=True)[1], 3, 0),
    "gather": (lambda x: x.gather(-1, INDEX), 1, 0),
    "gather of a slice": (lambda x: x[..., :60].gather(-1, INDEX.clamp(max=59)), 1, 0),
    "gather of a transposed vocabulary": (lambda x: x.transpose(1, 2).gather(1, INDEX.transpose(1, 2)), 1, 0),
    "softmax, then gather": (lambda x: F.softmax(x, dim=-1).gather(-1, INDEX), 3, 1),
    "log_softmax, then gather": (lambda x: torch.log_softmax(x, -1).gather(-1, INDEX), 3, 1),
    "entropy": (lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1), 5, 2),
    "per token logps of trl": (
        lambda x: x.gather(-1, INDEX[..., :1]).squeeze(-1) - torch.stack([torch.logsumexp(row, -1) for row in x]),
        5,
        0,
    ),
}


def check_whole_results() -> None:
    axis = tp_axis()
    for name, (operation, num_forward, num_backward) in WHOLE.items():
        whole = make_logits().requires_grad_()
        leaf, shard = split_logits(whole, axis)
        expected = operation(whole)
        with CollectiveCounter() as forward:
            got = operation(shard)
        assert type(got) is Tensor, name
        assert got.dtype == expected.dtype, name
        assert forward.calls["allreduce"][0] == forward.num_calls == num_forward, (name, forward.calls)
        if not expected.is_floating_point():
            assert torch.equal(got, expected), name
            continue
        assert_close(got, expected, 1e-6 if "fp32" in name else 1e-12, name)
        weight = torch.linspace(0.5, 2, expected.numel(), dtype=torch.float64).view_as(expected)
        (of_whole,) = torch.autograd.grad((expected * weight).sum(), whole)
        with CollectiveCounter() as backward:
            (of_shard,) = torch.autograd.grad((got * weight).sum(), leaf)
        assert backward.num_calls == num_backward, (name, backward.calls)
        assert_close(of_shard, layout_of(VOCABULARY, axis).narrow(of_whole), 1e-12, f"{name}, gradient")


@pytest.mark.parametrize("tp", [2, 3])
def test_reductions_over_the_vocabulary_equal_the_whole(rank_pool, tp):
    rank_pool(tp).run(check_whole_results)


def check_sharded_results() -> None:
    axis = tp_axis()
    for name in ("softmax", "log_softmax"):
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            whole = make_logits().to(dtype)
            _, shard = split_logits(whole, axis)
            expected, got = getattr(F, name)(whole, dim=-1), getattr(F, name)(shard, dim=-1)
            assert got.dtype == expected.dtype
            assert_close(got.to_local().detach(), got.vocab.narrow(expected), tolerance, name)
        widened = getattr(F, name)(split_logits(make_logits().bfloat16(), axis)[1], dim=-1, dtype=torch.float32)
        assert widened.dtype == torch.float32


def test_softmax_is_a_slice_in_the_dtype_asked_for(rank_pool):
    rank_pool(2).run(check_sharded_results)


ROUNDED_ONCE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "softmax of widened": lambda x: x.float().softmax(-1),
}


def check_half_precision(dtype: torch.dtype) -> None:
    """Results in half precision must be the exact ones rounded once: nothing in between may be rounded."""
    axis = tp_axis()
    for name, operation in ROUNDED_ONCE.items():
        logits = (make_logits() + 8).to(dtype)
        exact, got = operation(logits.double()), gather_logits(operation(split_logits(logits, axis)[1]))
        error = ((got.double() - exact).abs() / exact.abs().clamp(min=torch.finfo(got.dtype).tiny)).max()
        assert error <= 0.51 * torch.finfo(got.dtype).eps + 1e-6, (name, float(error))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(rank_pool, dtype):
    rank_pool(2).run(check_half_precision, dtype)


def check_replicated_operands() -> None:
    """A parameter that every rank has whole must get the whole gradient on every rank."""
    axis = tp_axis()
    uses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "scale": lambda x, p: x * p.mean(),
        "bias": lambda x, p: x + p,
        "bias, first": lambda x, p: p + x,
        "per position": lambda x, p: x / (2 + p[:3, None].square()),
        "where": lambda x, p: torch.where(x > 0, x, p),
        "in place": lambda x, p: (x * 1).add_(p),
    }
    for name, use in uses.items():
        weight = torch.randn(2, 3, VOCABULARY, dtype=torch.float64)
        torch.distributed.broadcast(weight, 0)
        gradients = []
        for logits in (make_logits(), split_logits(make_logits(), axis)[1]):
            parameter = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64, requires_grad=True)
            (use(logits, parameter).log_softmax(-1) * weight).sum().backward()
            gradients.append(parameter.grad)
        assert_close(gradients[1], gradients[0], 1e-12, name)


@pytest.mark.parametrize("tp", [2, 3])
def test_a_replicated_operand_gets_its_whole_gradient(rank_pool, tp):
    rank_pool(tp).run(check_replicated_operands)


def check_gathering() -> None:
    axis = tp_axis()
    whole = make_logits()
    leaf, shard = split_logits(whole, axis)
    outputs = CausalLMOutputWithPast(loss=torch.ones(()), logits=shard, hidden_states=(whole,))
    with CollectiveCounter() as count:
        gathered = gather_logits(outputs)
    assert count.calls == {"allgather": [1, max(shard.vocab.sizes) * 2 * 3 * 8]}
    assert isinstance(gathered, CausalLMOutputWithPast)
    assert torch.equal(gathered.logits, whole)
    assert torch.equal(gathered["logits"], whole)
    assert gathered.hidden_states[0] is whole
    assert outputs.logits is shard

    weight = torch.linspace(0, 1, whole.numel(), dtype=torch.float64).view_as(whole)
    (gathered.logits * weight).sum().backward()
    assert torch.equal(leaf.grad, shard.vocab.narrow(weight))

    others: list[Any] = [(outputs.loss, shard), {"logits": shard}, [shard.transpose(1, 2)[:, :50]], shard, shard.float()]
    expected = [whole, whole, whole.transpose(1, 2)[:, :50], whole, whole.float()]
    for value, wanted in zip(others, expected, strict=True):
        (result,) = [leaf for leaf in torch.utils._pytree.tree_leaves(gather_logits(value)) if leaf is not outputs.loss]
        assert type(result) is Tensor
        assert torch.equal(result, wanted)
    assert gather_logits(whole) is whole


@pytest.mark.parametrize("tp", [2, 3])
def test_gather_logits_makes_whole_logits_with_a_gradient(rank_pool, tp):
    rank_pool(tp).run(check_gathering)


def check_silence() -> None:
    _, shard = split_logits(make_logits(), tp_axis())
    with CollectiveCounter() as count:
        text = repr(shard) + str(shard.float())
        (shard[:, -1] * 2 + 1).view(-1, VOCABULARY).to_local().sum().backward()
    assert "VocabShard" in text
    assert count.calls == {}


def test_printing_slicing_and_arithmetic_never_communicate(rank_pool):
    rank_pool(2).run(check_silence)


def check_small_vocabulary() -> list[int]:
    """A slice of which some ranks hold nothing."""
    axis = tp_axis()
    whole = make_logits()
    leaf, shard = split_logits(whole, axis)
    few, labels = shard[..., :10], torch.tensor([[0, 9, -100], [5, 5, 1]])
    expected = F.cross_entropy(whole[..., :10].reshape(-1, 10), labels.view(-1), label_smoothing=0.1)
    loss = F.cross_entropy(few.reshape(-1, 10), labels.view(-1), label_smoothing=0.1)
    assert_close(loss, expected, 1e-12)
    (loss + few.max(-1).values.sum() + few.log_softmax(-1).sum()).backward()
    assert isinstance(few, VocabShard)
    return [few.vocab.length, leaf.grad[..., 10:].abs().sum().item()]


def test_a_slice_of_the_vocabulary_that_some_ranks_have_nothing_of(rank_pool):
    assert rank_pool(3).run(check_small_vocabulary) == [[10, 0], [0, 0], [0, 0]]
