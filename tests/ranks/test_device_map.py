"""Models on several pretend devices compute what they compute on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from placed_models import Made, check_copies, check_placed, image_model, picture_and_text_model, speech_model, text_model
from rank_pool import RankPool

QUICK = [("causal", "gpt2"), ("causal", "mixtral"), ("masked", "bert"), ("seq2seq", "t5"), ("seq2seq", "bart")]
SLOW = [
    ("causal", "llama"),
    ("causal", "bloom"),
    ("causal", "falcon"),
    ("causal", "gpt_neox"),
    ("causal", "gptj"),
    ("causal", "opt"),
    ("causal", "mpt"),
    ("causal", "gemma3"),
    ("causal", "gemma4"),
    ("causal", "mamba"),
    ("causal", "deepseek_v3"),
    ("causal", "qwen2_moe"),
    ("causal", "qwen3_next"),
    ("causal", "whisper"),
    ("masked", "roberta"),
    ("masked", "distilbert"),
    ("masked", "deberta-v2"),
    ("masked", "electra"),
    ("seq2seq", "mbart"),
    ("seq2seq", "pegasus"),
    ("seq2seq", "marian"),
    ("seq2seq", "qwen2_audio"),
]


@pytest.fixture(scope="module")
def pretend() -> Iterator[RankPool]:
    """A process of its own: torch keeps an accelerator for good."""
    pool = RankPool(1)
    yield pool
    pool.kill()


@pytest.mark.parametrize(("task", "model_type"), QUICK)
def test_placed_model_computes_what_it_computes_on_one_device(pretend: RankPool, task: str, model_type: str) -> None:
    pretend.run(check_placed, text_model, task, model_type, devices=("2", "cpu"))


@pytest.mark.parametrize("make", [image_model, speech_model, picture_and_text_model], ids=lambda make: make.__name__)
def test_placed_model_of_pictures_or_sound_computes_what_it_computes_on_one_device(
    pretend: RankPool, make: Callable[[], Made]
) -> None:
    pretend.run(check_placed, make, devices=("3", "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model_type"), [*QUICK, *SLOW])
def test_placed_architecture_computes_what_it_computes_on_one_device(pretend: RankPool, task: str, model_type: str) -> None:
    pretend.run(check_placed, text_model, task, model_type)


@pytest.mark.parametrize(("task", "model_type"), [("causal", "gpt2"), ("causal", "llama"), ("seq2seq", "t5")])
def test_no_more_is_copied_than_accelerate_copies(pretend: RankPool, task: str, model_type: str) -> None:
    pytest.importorskip("accelerate", reason="it is the peer")
    pretend.run(check_copies, task, model_type)
