"""no_repeat_ngram: reference and Triton program against the rule in plain Python, and against transformers."""

from __future__ import annotations

import random as python_random

import pytest
import torch
from torch import Tensor

from kernel_checks import WAYS, as_leaf, evaluate, random, run
from oslo_engine.kernels.dispatch import KernelInputError
from oslo_engine.kernels.no_repeat_ngram import no_repeat_ngram

NAME = "no_repeat_ngram.no_repeat_ngram"


def banned(ids: list[int], size: int, vocabulary: int) -> set[int]:
    """Tokens whose n-gram is there already."""
    ngrams = {tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)}
    return {token for token in range(vocabulary) if (*ids[len(ids) - size + 1 :], token) in ngrams}


def check(way: str, scores: Tensor, ids: Tensor, size: int) -> int:
    """Compare; return how many tokens were banned."""
    outputs, _ = run(way, evaluate, NAME, [scores, ids, size])
    expected = scores.detach().clone()
    for row, sequence in enumerate(ids.tolist()):
        for token in banned(sequence, size, scores.shape[1]):
            expected[row, token] = -torch.inf
    assert outputs[0].dtype == scores.dtype
    assert torch.equal(outputs[0], expected)
    return int(expected.isinf().sum())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_repeated_ngrams_are_banned(way: str, size: int) -> None:
    draw, total = python_random.Random(size), 0
    for length in [*range(9), 20, 30] if way == "interpreter" else range(40):
        ids = torch.tensor([[draw.randrange(3) for _ in range(length)] for _ in range(2)], dtype=torch.int64).view(2, length)
        total += check(way, random(2, 5), ids, size)
    assert total > 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_dtypes(way: str, dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]], dtype=ids_dtype)
    assert check(way, random(2, 6, dtype=dtype), ids, 3) == 2


@pytest.mark.parametrize("way", WAYS)
def test_strides_do_not_matter(way: str) -> None:
    ids = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 0, 4, 4]])
    for scores in (random(6, 2).t(), random(4, 9)[::2, 3:], random(6).expand(2, 6)):
        assert check(way, scores, ids.t().contiguous().t(), 3) == 2
        assert check(way, scores, ids.repeat_interleave(2, 1)[:, ::2], 3) == 2


@pytest.mark.parametrize("way", WAYS)
def test_sequences_longer_than_a_block(way: str) -> None:
    ids = torch.arange(2500).repeat(2, 1)
    ids[0, -2:] = torch.tensor([1500, 1501])
    ids[1, -2:] = torch.tensor([7, 9])
    assert check(way, random(2, 2600, grad=False), ids, 3) == 1


@pytest.mark.parametrize("way", WAYS)
def test_ids_outside_the_vocabulary_are_context_only(way: str) -> None:
    check(way, random(3, 5), torch.tensor([[9, -1, 9, -1, 9], [9, 2, 9, 3, 9], [-1, 4, -1, 7, -1]]), 2)
    outputs, _ = run(
        way, evaluate, NAME, [random(3, 5), torch.tensor([[9, -1, 9, -1, 9], [9, 2, 9, 3, 9], [-1, 4, -1, 7, -1]]), 2]
    )
    assert outputs[0].isinf().nonzero().tolist() == [[1, 2], [1, 3], [2, 4]]


@pytest.mark.parametrize("way", WAYS)
def test_input_is_left_alone_and_gradient_is_zero_where_banned(way: str) -> None:
    scores = as_leaf(random(2, 6))
    before = scores.detach().clone()
    outputs, grads = run(way, evaluate, NAME, [scores, torch.tensor([[1, 2, 1], [3, 3, 3]]), 2])
    assert torch.equal(scores, before)
    assert torch.equal(grads[0] == 0, outputs[0].isinf())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("batch", "length", "vocabulary"), [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_nothing_in_nothing_out(way: str, batch: int, length: int, vocabulary: int) -> None:
    ids = torch.zeros(batch, length, dtype=torch.int64)
    outputs, _ = run(way, evaluate, NAME, [random(batch, vocabulary, grad=False), ids, 2])
    assert outputs[0].shape == (batch, vocabulary)


RANGES = (1, 4), (0, 40), (2, 8), (1, 5)


def test_transformers_bans_the_same() -> None:
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

    generator = torch.Generator().manual_seed(0)
    total = 0
    for _ in range(1000):
        batch, length, words, size = (int(torch.randint(low, high, (), generator=generator)) for low, high in RANGES)
        ids = torch.randint(words, (batch, length), generator=generator)
        scores = torch.randn(batch, words + 1, generator=generator)
        expected = NoRepeatNGramLogitsProcessor(size)(ids, scores)
        assert torch.equal(no_repeat_ngram(scores, ids, size), expected)
        total += int(expected.isinf().sum())
    assert total > 1000


def test_op_is_well_formed() -> None:
    ids = torch.tensor([[1, 2, 1], [3, 3, 3]])
    torch.library.opcheck(torch.ops.oslo_engine.no_repeat_ngram.default, (as_leaf(random(6, 2).t()), ids, 2, -1.0))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_inputs_are_refused(device: str) -> None:
    scores, ids = torch.zeros(2, 5, device=device), torch.zeros(2, 4, dtype=torch.int64, device=device)
    for call in (
        lambda: no_repeat_ngram(scores[0], ids, 2),
        lambda: no_repeat_ngram(scores, ids[:1], 2),
        lambda: no_repeat_ngram(scores, ids.float(), 2),
        lambda: no_repeat_ngram(scores.int(), ids, 2),
        lambda: no_repeat_ngram(scores, ids, 0),
    ):
        with pytest.raises(KernelInputError, match="kernel no_repeat_ngram"):
            call()
