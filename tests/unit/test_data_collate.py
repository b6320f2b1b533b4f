"""Batches: documents kept apart without padding, spans corrupted as T5 does, masks by Transformers' own collator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from corpora import byte_level_bpe
from oslo_engine import DataError, DatasetForCausalLM, FlatteningCollator, IndexedDatasetBuilder, SpanCorruptionCollator

SENTINELS = list(range(99, 0, -1))


def data_set(folder: Path, **options: object) -> DatasetForCausalLM:
    with IndexedDatasetBuilder(folder / "set", vocab_size=60000) as builder:
        for start, length in ((100, 5), (110, 3), (120, 9), (130, 7)):
            builder.add_document(range(start, start + length), [length])
    return DatasetForCausalLM(folder / "set", 8, **options)  # type: ignore[arg-type]


def test_windows_become_one_row_with_the_borders_of_documents(tmp_path: Path) -> None:
    loader = DataLoader(data_set(tmp_path, borders=["cu_seqlens"]), batch_size=2, collate_fn=FlatteningCollator())
    batch = next(iter(loader))
    assert batch["input_ids"].tolist() == [[*range(100, 105), *range(110, 113), *range(120, 128)]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 5, 8, 16]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 8
    assert batch["position_ids"].tolist() == [[*range(5), *range(3), *range(8)]]
    expected = [-100, *range(101, 105), -100, *range(111, 113), -100, *range(121, 128)]
    assert batch["labels"].tolist() == [expected]


def test_documents_in_one_row_have_the_logits_they_have_alone(tmp_path: Path) -> None:
    """By Transformers' own reading of position ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=200, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(config).eval()
    batch = FlatteningCollator()([data_set(tmp_path, borders=["cu_seqlens"])[0]])
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = [model(input_ids=batch["input_ids"][:, start:stop]).logits[0] for start, stop in ((0, 5), (5, 8))]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_items_without_borders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cu_seqlens"):
        FlatteningCollator()([data_set(tmp_path)[0]])


def restored(inputs: list[int], labels: list[int]) -> list[int]:
    """The text, from an input and its labels."""
    spans: dict[int, list[int]] = {}
    for token in labels:
        if token in SENTINELS:
            spans[current := token] = []
        else:
            spans[current].append(token)
    return [token for each in inputs for token in (spans[each] if each in SENTINELS else [each])]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 300), min_size=1, max_size=4),
    density=st.floats(0.05, 0.6),
    mean=st.floats(1, 6),
    seed=st.integers(0, 9),
)
def test_corrupted_text_can_be_restored_from_its_labels(lengths: list[int], density: float, mean: float, seed: int) -> None:
    torch.manual_seed(seed)
    collator = SpanCorruptionCollator(list(range(99, -200, -1)), 500, 501, density, mean)
    SENTINELS[:] = list(range(99, -200, -1))
    items = [{"input_ids": torch.arange(1000, 1000 + length)} for length in lengths]
    batch = collator(items)
    for row, length in enumerate(lengths):
        used = int(batch["attention_mask"][row].sum())
        inputs, labels = batch["input_ids"][row].tolist(), [each for each in batch["labels"][row].tolist() if each != -100]
        assert set(inputs[used:]) <= {501}
        assert inputs[used - 1] == labels[-1] == 500
        assert restored(inputs[: used - 1], labels[:-1]) == list(range(1000, 1000 + length))
        noise = [token for token in labels[:-1] if token >= 1000]
        assert len(noise) == min(max(round(length * density), 1), length - 1)
        sentinels = [token for token in inputs if token < 100]
        assert sentinels == SENTINELS[: len(sentinels)]
        assert inputs[0] >= 1000  # a text begins with what is kept


def test_each_batch_is_corrupted_anew_and_a_seed_repeats_it() -> None:
    collator, items = SpanCorruptionCollator(range(99, 0, -1), 500, 501), [{"input_ids": list(range(1000, 1100))}]
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn += [collator(items)["input_ids"].tolist() for _ in range(2)]
    assert drawn[:2] == drawn[2:4]
    assert len({str(each) for each in drawn}) == 4


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sentinel_ids": []}, "needs sentinels"),
        ({"noise_density": 0.0}, "no such corruption"),
        ({"noise_density": 1.0}, "no such corruption"),
        ({"mean_span_length": 0.5}, "no such corruption"),
    ],
    ids=str,
)
def test_a_corruption_that_cannot_be_is_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        SpanCorruptionCollator(**{"sentinel_ids": [9], "eos_token_id": 1, "pad_token_id": 0, **options})  # type: ignore[arg-type]


def test_texts_that_are_too_short_or_have_too_many_spans_are_refused() -> None:
    collator = SpanCorruptionCollator([9], 1, 0)
    with pytest.raises(DataError, match="too short"):
        collator([{"input_ids": [5]}])
    with pytest.raises(DataError, match="more spans"):
        collator([{"input_ids": list(range(100))}])


def test_padding_is_not_corrupted(tmp_path: Path) -> None:
    data = data_set(tmp_path, arrangement="best_fit", pad_token_id=0)
    batch = SpanCorruptionCollator([9, 8, 7], 1, 0)([data[at] for at in range(len(data))])
    kept = batch["input_ids"][batch["attention_mask"].bool()]
    assert 0 not in kept.tolist()


def test_masks_are_made_by_transformers(tmp_path: Path) -> None:
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe(), mask_token="<|endoftext|>", pad_token="!")
    torch.manual_seed(0)
    data = data_set(tmp_path)
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.5)([data[0], data[1]])
    chosen = batch["labels"] != -100
    assert 0 < chosen.sum() < chosen.numel()
    whole = torch.stack([data[0]["input_ids"], data[1]["input_ids"]])
    assert torch.equal(batch["labels"][chosen], whole[chosen])
    assert torch.equal(batch["input_ids"][~chosen], whole[~chosen])
