"""Cutting a batch, and the share of the loss each micro-batch carries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from oslo_engine.errors import BatchError
from oslo_engine.pipeline.micro_batch import MicroBatch, fingerprint, loss_weights, split_batch, weigh_by_labels


def ids(rows: int, length: int = 3) -> Tensor:
    return torch.arange(rows * length).view(rows, length)


def with_labels(*valid: int, length: int = 6) -> list[MicroBatch]:
    """One micro-batch of one row per argument, with that many labels from the left on."""
    labels = torch.full((len(valid), length), -100)
    for row, number in enumerate(valid):
        labels[row, :number] = 1
    return split_batch({"input_ids": ids(len(valid), length), "labels": labels}, 1)


# Splitting


@pytest.mark.parametrize(("rows", "size", "expected"), [(8, 2, [2, 2, 2, 2]), (7, 3, [3, 3, 1]), (2, 5, [2]), (1, 1, [1])])
def test_rows_are_cut_in_order_and_the_last_micro_batch_may_be_smaller(rows: int, size: int, expected: list[int]) -> None:
    whole = {"input_ids": ids(rows), "attention_mask": torch.ones(rows, 3)}
    micros = split_batch(whole, size)
    assert [micro.kwargs["input_ids"].shape[0] for micro in micros] == expected
    assert [micro.index for micro in micros] == list(range(len(expected)))
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([micro.kwargs[name] for micro in micros]), tensor)


def test_rows_are_those_of_input_ids_else_inputs_embeds_else_the_first_tensor() -> None:
    table = torch.ones(1, 9)
    assert len(split_batch({"table": table, "input_ids": ids(4)}, 1)) == 4
    assert len(split_batch({"table": table, "inputs_embeds": torch.ones(3, 2, 2)}, 1)) == 3
    assert len(split_batch({"flag": True, "scale": torch.tensor(2.0), "pixel_values": torch.ones(5, 3, 4, 4)}, 1)) == 5


def test_scalars_single_rows_and_plain_values_go_to_every_micro_batch() -> None:
    shared = {"scale": torch.tensor(2.0), "position_ids": torch.arange(3)[None], "use_cache": False, "mode": "x", "none": None}
    for micro in split_batch({"input_ids": ids(4), **shared}, 2):
        assert all(micro.kwargs[name] is value for name, value in shared.items())


def test_model_outputs_tuples_and_dicts_are_cut_inside() -> None:
    hidden = torch.arange(24.0).view(4, 3, 2)
    batch = {
        "decoder_input_ids": ids(4),
        "encoder_outputs": BaseModelOutput(last_hidden_state=hidden, attentions=(hidden + 1,)),
        "extra": {"pair": (hidden + 2, "text")},
    }
    second = split_batch(batch, 2)[1].kwargs
    assert isinstance(second["encoder_outputs"], BaseModelOutput)
    assert torch.equal(second["encoder_outputs"].last_hidden_state, hidden[2:])
    assert torch.equal(second["encoder_outputs"].attentions[0], hidden[2:] + 1)
    assert torch.equal(second["extra"]["pair"][0], hidden[2:] + 2)
    assert second["extra"]["pair"][1] == "text"


def test_tensors_with_other_numbers_of_rows_are_all_named() -> None:
    batch = {"input_ids": ids(4), "labels": ids(3), "extra": (torch.ones(4), torch.ones(5, 2))}
    with pytest.raises(BatchError) as caught:
        split_batch(batch, 2)
    assert caught.value.where == "labels (3, 3), extra[1] (5, 2)"
    assert caught.value.got == "3, 5"
    assert "4, as input_ids has" in str(caught.value)


@pytest.mark.parametrize("batch", [{}, {"use_cache": True, "scale": torch.tensor(1.0)}, {"input_ids": ids(0)}])
def test_batch_without_rows_is_refused(batch: dict[str, object]) -> None:
    with pytest.raises(BatchError, match="no rows"):
        split_batch(batch, 1)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2", None])
def test_micro_batch_size_must_be_a_positive_integer(size: object) -> None:
    with pytest.raises(BatchError, match="positive integer"):
        split_batch({"input_ids": ids(2)}, size)  # type: ignore[arg-type]


def test_signatures_are_equal_exactly_where_shapes_dtypes_and_plain_values_are() -> None:
    first, second, smaller = split_batch({"input_ids": ids(5), "use_cache": False}, 2)
    assert first.signature == second.signature != smaller.signature
    assert hash(first.signature) == hash(second.signature)
    for other in ({"input_ids": ids(2).int()}, {"input_ids": ids(2), "use_cache": True}, {"other": ids(2), "use_cache": False}):
        assert split_batch(other, 2)[0].signature != first.signature


def test_weight_without_labels_is_the_share_of_the_rows() -> None:
    assert [micro.weight for micro in split_batch({"input_ids": ids(5)}, 2)] == [0.4, 0.4, 0.2]


# Weights


def test_weights_are_shares_of_the_labels_that_count() -> None:
    assert loss_weights(with_labels(1, 0, 4, 3), shift_labels=False) == [1 / 8, 0.0, 4 / 8, 3 / 8]


def test_shifted_labels_do_not_count_the_first_position() -> None:
    assert loss_weights(with_labels(1, 0, 4, 3), shift_labels=True) == [0.0, 0.0, 3 / 5, 2 / 5]


@pytest.mark.parametrize("shift_labels", [False, True])
def test_weighted_losses_and_gradients_add_up_to_those_of_the_whole_batch(shift_labels: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(9, (7, 5), generator=generator)
    labels[torch.rand(7, 5, generator=generator) < 0.4] = -100
    logits = torch.randn(7, 5, 9, generator=generator, dtype=torch.float64, requires_grad=True)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = (logits[:, :-1], labels[:, 1:]) if shift_labels else (logits, labels)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    whole = loss(logits, labels)
    micros = weigh_by_labels(
        split_batch({"input_ids": ids(7), "labels": labels, "rows": torch.arange(7)}, 2), shift_labels=shift_labels
    )
    parts = sum(loss(logits[micro.kwargs["rows"]], micro.kwargs["labels"]) * micro.weight for micro in micros)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    (expected,), (found,) = (torch.autograd.grad(value, logits) for value in (whole, parts))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_float_labels_count_all_their_elements() -> None:
    micros = split_batch({"input_ids": ids(5), "labels": torch.rand(5, 4)}, 2)
    assert loss_weights(micros, shift_labels=False) == [0.4, 0.4, 0.2]


def test_labels_of_one_per_row_are_never_shifted() -> None:
    micros = split_batch({"input_ids": ids(4), "labels": torch.tensor([1, -100, 2, 0])}, 2)
    assert loss_weights(micros, shift_labels=True) == [1 / 3, 2 / 3]


def test_labels_given_as_shifted_count_as_they_are_and_replace_labels() -> None:
    labels = torch.tensor([[5, 5, 5], [5, -100, -100]])
    shifted = torch.tensor([[5, 5, -100], [-100, -100, -100]])
    micros = split_batch({"input_ids": ids(2), "labels": labels, "shift_labels": shifted}, 1)
    assert loss_weights(micros, shift_labels=True) == [1.0, 0.0]


@pytest.mark.parametrize("num_items", [7, torch.tensor(7)])
def test_num_items_in_batch_leaves_the_division_to_the_model(num_items: object) -> None:
    batch = {"input_ids": ids(2), "labels": torch.tensor([[1, -100, 2], [-100] * 3]), "num_items_in_batch": num_items}
    assert loss_weights(split_batch(batch, 1), shift_labels=True) == [1.0, 1.0]


def test_num_items_in_batch_allows_a_batch_that_adds_nothing() -> None:
    batch = {"input_ids": ids(2), "labels": torch.full((2, 3), -100), "num_items_in_batch": 7}
    assert loss_weights(split_batch(batch, 1), shift_labels=True) == [1.0, 1.0]


def test_question_answering_counts_positions_inside_the_text() -> None:
    starts = torch.tensor([0, 2, 3, 9])  # a text of 3 tokens: 3 and 9 are past its end
    micros = split_batch({"input_ids": ids(4), "start_positions": starts, "end_positions": starts}, 2)
    assert loss_weights(micros, shift_labels=False) == [1.0, 0.0]


def test_two_kinds_of_labels_with_the_same_shares_are_accepted_and_others_refused() -> None:
    batch = {
        "input_ids": ids(4),
        "labels": torch.ones(4, 3, dtype=torch.long),
        "next_sentence_label": torch.tensor([0, 1, 0, 1]),
    }
    assert loss_weights(split_batch(batch, 2), shift_labels=False) == [0.5, 0.5]
    batch["labels"][0, 0] = -100
    with pytest.raises(BatchError, match=r"(?s)several kinds.*labels: \[5, 6\]; next_sentence_label: \[2, 2\].*use pp=1"):
        loss_weights(split_batch(batch, 2), shift_labels=False)


def test_batch_without_labels_is_refused() -> None:
    with pytest.raises(BatchError, match="without labels") as caught:
        loss_weights(split_batch({"input_ids": ids(2), "labels": None}, 1), shift_labels=False)
    assert caught.value.got == "input_ids, labels"


def test_batch_whose_labels_are_all_ignored_is_refused() -> None:
    with pytest.raises(BatchError, match="no label to learn from"):
        loss_weights(with_labels(0, 0), shift_labels=False)
    with pytest.raises(BatchError, match="after the first position"):
        loss_weights(with_labels(1, 1), shift_labels=True)


# Fingerprints


def test_fingerprint_tells_batches_apart() -> None:
    batch = {"input_ids": ids(5), "mask": torch.ones(5, 3, dtype=torch.bool), "scale": torch.tensor(0.5), "use_cache": False}
    same = fingerprint(split_batch(batch, 2))
    assert same.dtype == torch.int64
    assert torch.equal(same, fingerprint(split_batch(batch | {"input_ids": ids(5)}, 2)))
    mask = torch.ones(5, 3, dtype=torch.bool)
    mask[4, 2] = False
    for change in ({"input_ids": ids(5) + 1}, {"input_ids": ids(5).roll(2, 0)}, {"mask": mask}, {"scale": torch.tensor(0.25)}):
        assert not torch.equal(same, fingerprint(split_batch(batch | change, 2)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int32, torch.float64, torch.complex128])
def test_fingerprint_takes_every_dtype_and_layout(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4).to(dtype)
    fingerprints = {int(fingerprint(split_batch({"x": t}, 3))) for t in (x, x.t().contiguous().t(), x.clone())}
    assert len(fingerprints) == 1
    assert int(fingerprint(split_batch({"x": torch.zeros(3, 0)}, 1))) == 0


def test_a_model_that_ignores_the_number_of_items_is_weighed_by_its_labels() -> None:
    batch = {"input_ids": ids(2), "labels": ids(2), "num_items_in_batch": 7}
    assert loss_weights(split_batch(batch, 1), shift_labels=True, divides_by_count=False) == [0.5, 0.5]
