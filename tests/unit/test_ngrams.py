"""Blocking n-grams by the kernel gives what Transformers' own processor gives, in every position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

import small_models
from oslo_engine.errors import UnsupportedError
from oslo_engine.generation.ngrams import FusedNoRepeatNGram, fused_ngram_blocking, use_fused_ngram_blocking
from oslo_engine.methods import with_parallel_methods

CASES = 1000


def test_a_thousand_random_texts_have_the_same_tokens_banned() -> None:
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    num_banned = 0
    for _ in range(CASES):
        rows, length, vocabulary, size = number(1, 5), number(1, 24), number(2, 9), number(1, 5)
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        scores = torch.randn(rows, vocabulary, generator=generator)
        given = scores.clone()
        wanted = NoRepeatNGramLogitsProcessor(size)(ids, scores.clone())
        assert torch.equal(FusedNoRepeatNGram(size)(ids, scores), wanted)
        assert torch.equal(scores, given)
        num_banned += int(wanted.isinf().sum())
    assert num_banned > CASES


def build(name: str) -> Any:
    cls, config, _ = getattr(small_models, name)()
    torch.manual_seed(0)
    return with_parallel_methods(cls)(config).eval()


HOW: list[tuple[str, dict[str, Any], bool]] = [
    ("gpt2", {}, False),
    ("gpt2", {}, True),
    ("gpt2", {"num_beams": 3}, False),
    ("gpt2", {"num_beams": 4, "do_sample": True}, False),
    ("t5", {}, False),
    ("bart", {"num_beams": 3}, True),
]


@pytest.mark.parametrize(("name", "how", "fused"), HOW, ids=str)
def test_generate_gives_the_same_tokens(name: str, how: dict[str, Any], fused: bool) -> None:
    model = build(name)
    ids = torch.randint(3, small_models.VOCAB, (2, 5), generator=torch.Generator().manual_seed(2))
    arguments = {
        "max_new_tokens": 20,
        "do_sample": False,
        "no_repeat_ngram_size": 2,
        "pad_token_id": 0,
        "eos_token_id": None,
    } | how

    def tokens(**more: Any) -> torch.Tensor:
        torch.manual_seed(3)
        found: torch.Tensor = model.generate(ids, **(arguments | more))
        return found

    wanted = tokens()
    assert not torch.equal(tokens(no_repeat_ngram_size=0), wanted)  # or nothing would have been blocked
    if fused:
        model.fuse()
    assert torch.equal(tokens(fused_no_repeat_ngram_blocking=True), wanted)


def test_only_transformers_own_processor_is_replaced_and_only_when_asked() -> None:
    class Special(NoRepeatNGramLogitsProcessor):
        pass

    processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(3), Special(2)])
    use_fused_ngram_blocking(processors)
    assert [type(each) for each in processors] == [NoRepeatNGramLogitsProcessor, Special]
    with fused_ngram_blocking(True):
        use_fused_ngram_blocking(processors)
    assert [type(each) for each in processors] == [FusedNoRepeatNGram, Special]
    assert processors[0].ngram_size == 3


def test_asking_for_it_without_n_grams_to_block_is_an_error() -> None:
    model = build("gpt2")
    with pytest.raises(UnsupportedError, match="no_repeat_ngram_size"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, fused_no_repeat_ngram_blocking=True)
