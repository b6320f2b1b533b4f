"""Generate calls that run together: what may, how they are joined, and what each gets back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oslo_engine.deploy.batching import as_prompt, batch_key, join, looks_back, split
from oslo_engine.deploy.messages import Prompt, Traits
from oslo_engine.deploy.settings import Deployment
from oslo_engine.errors import DeploymentError


def traits(**more: Any) -> Traits:
    generation = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    told = {"config": SimpleNamespace(is_encoder_decoder=False), "generation_config": generation}
    return Traits(**{**told, "mixes_lengths": True, **more})


def rows(*tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens)


def key(ids: torch.Tensor, told: Traits | None = None, **settings: Any) -> Any:
    found = as_prompt((ids,), settings, told or traits(), streams=False)
    return None if found is None else batch_key(*found, told or traits())


def test_a_single_answer_may_be_asked_for_by_name() -> None:
    stated: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
    short, long = key(rows([5, 6]), max_new_tokens=3, **stated), key(rows([5, 6, 7]), max_new_tokens=9, **stated)
    assert short == long is not None


def test_lengths_and_limits_may_differ() -> None:
    assert key(rows([5, 6]), max_new_tokens=3, top_k=4) == key(rows([5, 6, 7]), max_new_tokens=9, top_k=4) is not None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"max_new_tokens": 3, "top_k": 4}, {"max_new_tokens": 3, "top_k": 5}),
        ({"max_new_tokens": 3, "do_sample": True}, {"max_new_tokens": 3, "do_sample": 1}),
        ({"max_new_tokens": 3}, {}),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": [3, 2]}),
    ],
)
def test_settings_that_differ_run_apart(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert key(rows([5, 6]), **first) != key(rows([5, 6]), **second)


def test_lengths_run_apart_where_padding_would_be_seen() -> None:
    short, long = rows([5, 6]), rows([5, 6, 7])
    assert key(short, max_new_tokens=3, repetition_penalty=1.2) != key(long, max_new_tokens=3, repetition_penalty=1.2)
    backward = SimpleNamespace(pad_token_id=0, eos_token_id=2, repetition_penalty=1.1)
    for told in (traits(mixes_lengths=False), traits(generation_config=backward)):
        assert key(short, told, max_new_tokens=3) != key(long, told, max_new_tokens=3)
        assert key(short, told, max_new_tokens=3) == key(short + 1, told, max_new_tokens=3)


def test_a_prompt_with_padding_but_no_mask_runs_alone() -> None:
    assert key(rows([0, 6]), max_new_tokens=3) is None


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 2}, {"num_return_sequences": 2}, {"inputs_embeds": torch.ones(1, 2, 3)}, {"return_dict_in_generate": True}],
)
def test_other_ways_to_generate_run_as_they_are(settings: dict[str, Any]) -> None:
    assert as_prompt((rows([5, 6]),), settings, traits(), streams=False) is None


@pytest.mark.parametrize("own", [{"num_beams": 2}, {"num_return_sequences": 2}, {"return_dict_in_generate": True}])
def test_the_model_s_own_settings_count_as_those_of_the_call(own: dict[str, Any]) -> None:
    told = traits(generation_config=SimpleNamespace(pad_token_id=0, eos_token_id=2, **own))
    assert as_prompt((rows([5, 6]),), {}, told, streams=False) is None
    stated = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
    assert as_prompt((rows([5, 6]),), stated, told, streams=False) is not None


def test_a_model_that_looks_back_by_itself_is_seen() -> None:
    assert looks_back(SimpleNamespace(repetition_penalty=1.1))
    assert not looks_back(SimpleNamespace(repetition_penalty=1.0, no_repeat_ngram_size=0))


def test_joining_pads_on_the_left_and_masks_it() -> None:
    prompts = [Prompt(rows([5, 6, 7]), None, 4), Prompt(rows([8], [9]), None, 2)]
    joined = join(prompts, 0)
    assert joined.ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 0, 9]]
    assert joined.mask is not None
    assert joined.mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert joined.limits == [4, 2, 2]
    assert joined.prompt_of_row == [0, 1, 1]


def test_joining_keeps_a_callers_own_mask() -> None:
    joined = join([Prompt(rows([0, 6]), rows([0, 1]), 4), Prompt(rows([5, 6, 7]), None, 4)], 0)
    assert joined.mask is not None
    assert joined.mask.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_one_prompt_without_a_mask_gets_none() -> None:
    assert join([Prompt(rows([5, 6]), None, 4)], 0).mask is None


def test_splitting_gives_each_row_its_own_end() -> None:
    prompts = [Prompt(rows([5, 6, 7]), None, 4), Prompt(rows([8], [9]), None, 3)]
    joined = join(prompts, 0)
    new = rows([11, 12, 13, 14], [21, 2, 0, 0], [31, 32, 33, 34])
    first, second = split(torch.cat([joined.ids, new], dim=1), prompts, joined, 0, [2])
    assert first.tolist() == [[5, 6, 7, 11, 12, 13, 14]]
    assert second.tolist() == [[8, 21, 2, 0], [9, 31, 32, 33]]


def test_splitting_cuts_to_the_longest_row_of_the_call() -> None:
    prompts = [Prompt(rows([5, 6], [5, 7]), None, 4), Prompt(rows([8, 8]), None, 4)]
    joined = join(prompts, 9)
    new = rows([2, 9, 9, 9], [21, 2, 9, 9], [31, 32, 33, 34])
    first, second = split(torch.cat([joined.ids, new], dim=1), prompts, joined, 9, [2])
    assert first.tolist() == [[5, 6, 2, 9], [5, 7, 21, 2]]
    assert second.tolist() == [[8, 8, 31, 32, 33, 34]]


def test_splitting_without_limits_ends_at_the_end_token() -> None:
    prompts = [Prompt(rows([5, 6])), Prompt(rows([7, 8]))]
    decoder = rows([0, 11, 2, 0], [0, 21, 22, 2])  # starts with a token of its own
    first, second = split(decoder, prompts, join(prompts, 0), 0, [2])
    assert first.tolist() == [[0, 11, 2]]
    assert second.tolist() == [[0, 21, 22, 2]]


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(DeploymentError, match="max_queue"):
        Deployment(max_queue=0)
