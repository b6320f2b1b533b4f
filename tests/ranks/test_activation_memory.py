"""Activation checkpointing and sequence parallelism lower the most memory that a step needs, in counted bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oslo_engine as oslo
import small_models
from training_runs import Recipe, activation_bytes, unsplit

ROWS, LENGTH = 4, 32


def most_bytes(recipe: Recipe) -> int:
    model, _ = unsplit(recipe)
    if recipe.tp * recipe.pp > 1:
        oslo.parallelize(model, tp=recipe.tp, pp=recipe.pp, micro_batch_size=2, sequence_parallel=recipe.sequence_parallel)
    ids = torch.randint(3, small_models.VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return activation_bytes(model, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_tensor_parallelism_sequence_parallelism_and_checkpointing_each_need_less(rank_pool: Any, model: str) -> None:
    whole = most_bytes(Recipe(model))
    plain, split_sequence, recomputed, both = (
        max(rank_pool(2).run(most_bytes, Recipe(model, tp=2, sequence_parallel=sequence, checkpointing=checkpointing)))
        for checkpointing in (False, True)
        for sequence in (False, True)
    )
    print(model, whole, plain, split_sequence, recomputed, both)
    assert plain < whole
    assert split_sequence < plain
    assert recomputed < plain


def test_checkpointing_in_a_pipeline_needs_less(rank_pool: Any) -> None:
    plain, recomputed = (
        rank_pool(2).run(most_bytes, Recipe(pp=2, checkpointing=checkpointing)) for checkpointing in (False, True)
    )
    print(plain, recomputed)
    assert all(less < more for less, more in zip(recomputed, plain, strict=True))
