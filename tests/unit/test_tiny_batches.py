"""Batches that are hard to split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oslo_engine.pipeline.micro_batch import loss_weights, split_batch
from oslo_engine.pipeline.orders import SCHEDULES, schedule_orders
from oslo_engine.tiny.batches import IGNORED, make_batch, make_inputs, training_shapes


def config(**more: Any) -> Any:
    return SimpleNamespace(**{"vocab_size": 131, "pad_token_id": 7, "is_encoder_decoder": False, **more})


def batch(micro_batch_size: int = 2, number: int = 0, pp: int = 2, **more: Any) -> dict[str, torch.Tensor]:
    shape = training_shapes(pp=pp, micro_batch_size=micro_batch_size)[number]
    return make_batch(config(**more), shape, micro_batch_size=micro_batch_size, seed=0)


def test_rows_are_padded_on_the_left_by_different_lengths() -> None:
    mask = batch()["attention_mask"]
    padded = (mask == 0).sum(1)
    assert padded[0] >= 3
    assert len(padded.unique()) > 1
    assert (mask[:, 1:] >= mask[:, :-1]).all()  # never a hole, never on the right
    assert mask[:, -1].all()


def test_pad_token_stands_where_it_should_and_nowhere_else() -> None:
    made = batch()
    assert torch.equal(made["input_ids"] == 7, made["attention_mask"] == 0)
    assert made["input_ids"].max() < 131


@pytest.mark.parametrize("pad", [None, 500, 0])
def test_config_without_a_usable_pad_token_gets_zero(pad: int | None) -> None:
    assert (batch(pad_token_id=pad)["input_ids"][0, 0]) == 0


def test_labels_are_spread_unevenly_and_one_micro_batch_has_none() -> None:
    made = batch()
    weights = loss_weights(split_batch(made, 2), shift_labels=True)
    assert len(weights) == 3
    assert weights[1] == 0
    assert 0 < weights[0] < weights[2]


def test_padded_positions_have_no_label() -> None:
    made = batch()
    assert (made["labels"][made["attention_mask"] == 0] == IGNORED).all()
    kept = made["labels"] != IGNORED
    assert torch.equal(made["labels"][kept], made["input_ids"][kept])


def test_encoder_decoder_gets_a_target_of_another_length() -> None:
    made = batch(is_encoder_decoder=True)
    assert made["labels"].shape[1] != made["input_ids"].shape[1]
    assert (made["labels"] != IGNORED).any(1)[0]


def test_shapes_differ_and_the_last_micro_batch_is_smaller() -> None:
    shapes = training_shapes(pp=2, micro_batch_size=4)
    assert len({shape.length for shape in shapes}) == len({shape.rows for shape in shapes}) == 3
    assert all(shape.rows % 4 == 3 for shape in shapes)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_takes_these_numbers_of_micro_batches(schedule: Any, pp: int) -> None:
    for micro_batch_size in (1, 2, 3):
        for shape in training_shapes(pp=pp, micro_batch_size=micro_batch_size):
            assert schedule_orders(schedule, pp, -(-shape.rows // micro_batch_size))


@pytest.mark.parametrize("multiple", [2, 3, 4])
def test_lengths_are_multiples_where_they_must_be(multiple: int) -> None:
    for shape in training_shapes(pp=1, micro_batch_size=2, multiple=multiple):
        assert shape.length % multiple == shape.target % multiple == 0


def test_same_seed_gives_the_same_inputs() -> None:
    first, second = (make_inputs(config(), 3, 8, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first[0], second[0])


class Model(torch.nn.Module):
    """Something with a config and a forward."""

    def __init__(self, forward: Any, heads: Any = None, **more: Any) -> None:
        super().__init__()
        self.config, self.forward, self._heads = config(**more), forward, heads

    def get_output_embeddings(self) -> Any:
        return self._heads


def batch_for(model: Model) -> dict[str, torch.Tensor]:
    shape = training_shapes(pp=2, micro_batch_size=2)[0]
    return make_batch(model.config, shape, micro_batch_size=2, seed=0, model=model)


def test_model_gets_only_what_its_forward_takes() -> None:
    assert set(batch_for(Model(lambda input_ids, labels: None))) == {"input_ids", "labels"}


def test_decoder_is_given_tokens_even_where_a_row_has_no_label() -> None:
    made = batch_for(Model(lambda input_ids, decoder_input_ids, labels: None, is_encoder_decoder=True))
    assert made["decoder_input_ids"].shape == made["labels"].shape
    assert (made["decoder_input_ids"][:, 0] == 7).all()
    assert (made["labels"] == IGNORED).all(1).any()
    kept = made["labels"][:, :-1] != IGNORED
    assert torch.equal(made["labels"][:, :-1][kept], made["decoder_input_ids"][:, 1:][kept])


def test_model_that_hears_gets_frames_for_token_ids() -> None:
    sound = {"num_mel_bins": 5, "max_source_positions": 6, "is_encoder_decoder": True}
    made = batch_for(Model(lambda input_features, decoder_input_ids, labels: None, **sound))
    assert made["input_features"].shape == (made["labels"].shape[0], 5, 12)
    assert "input_ids" not in made


def test_head_for_each_codebook_gets_labels() -> None:
    model = Model(lambda input_ids, labels: None, heads=torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]))
    made = batch_for(model)
    rows, length, books = made["labels"].shape
    assert (books, made["input_ids"].shape) == (2, (2 * rows, length))


def test_model_that_answers_for_all_its_positions_gets_labels_for_them() -> None:
    made = batch_for(Model(lambda input_ids, labels: None, num_latents=3, max_position_embeddings=40))
    assert made["labels"].shape[1] == 40
    assert (made["labels"][:, made["input_ids"].shape[1] :] == IGNORED).all()


def test_vocabulary_of_a_composite_config_is_that_of_its_text() -> None:
    composite = config(vocab_size=None, get_text_config=lambda: config(vocab_size=5))
    ids, _ = make_inputs(composite, 9, 20, torch.Generator().manual_seed(0))
    assert ids.max() == 4
