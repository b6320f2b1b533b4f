"""Windows of a data set: which tokens are where, what is said about borders, and that each token comes once."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oslo_engine import DataError, DatasetForCausalLM, IndexedDatasetBuilder
from oslo_engine.data import causal
from oslo_engine.data.windows import best_fit_arrays

LENGTHS = [0, 5, 0, 0, 3, 1, 12, 2, 7, 0]  # 30 tokens, which are 100, 101, ...


def build(folder: Path, lengths: list[int], name: str = "set") -> Path:
    token = 100
    with IndexedDatasetBuilder(folder / name, vocab_size=60000) as builder:
        for length in lengths:
            builder.add_document(range(token, token + length), [length] if length else [])
            token += length
    return folder / name


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return build(tmp_path, LENGTHS)


def rows(data: Any, key: str = "input_ids") -> list[list[int]]:
    return [data[at][key].tolist() for at in range(len(data))]


def test_windows_follow_one_another(prefix: Path) -> None:
    data = DatasetForCausalLM(prefix, 8)
    assert rows(data) == [list(range(start, start + 8)) for start in (100, 108, 116)]
    assert rows(data, "labels") == rows(data)
    assert data[0]["input_ids"].dtype == torch.int64
    assert data[-1]["input_ids"].tolist() == data[2]["input_ids"].tolist()
    assert set(data[0]) == {"input_ids", "labels"}


def test_a_change_to_the_inputs_leaves_labels_and_file_alone(prefix: Path) -> None:
    data = DatasetForCausalLM(prefix, 8)
    item = data[0]
    item["input_ids"].zero_()
    assert item["labels"].tolist() == data[0]["input_ids"].tolist() == list(range(100, 108))


@pytest.mark.parametrize("implementation", ["mmap", "lazy", "cached"])
@pytest.mark.parametrize("length", [6, 7, 30])
def test_a_last_window_that_is_full_is_kept(prefix: Path, implementation: str, length: int) -> None:
    data = DatasetForCausalLM(prefix, length, binarization_impl=implementation)
    assert [len(row) for row in rows(data)] == [length] * (30 // length)
    assert sum(rows(data), [])[-1] == 100 + 30 // length * length - 1  # noqa: RUF017


def test_tail_is_dropped_padded_or_kept(prefix: Path) -> None:
    assert len(DatasetForCausalLM(prefix, 8, tail="drop")) == 3
    kept = DatasetForCausalLM(prefix, 8, tail="keep")
    assert (len(kept), rows(kept)[-1]) == (4, list(range(124, 130)))
    padded = DatasetForCausalLM(prefix, 8, tail="pad", pad_token_id=0)
    assert rows(padded)[-1] == [*range(124, 130), 0, 0]
    assert rows(padded, "labels")[-1] == [*range(124, 130), -100, -100]
    assert rows(padded, "attention_mask")[-2:] == [[1] * 8, [1] * 6 + [0] * 2]


def test_parts_by_weight_share_no_document_and_leave_none_out(prefix: Path) -> None:
    edges = (0.0, 0.5, 0.73, 1.0)
    found = [row for start, end in pairwise(edges) for row in rows(DatasetForCausalLM(prefix, 1, "part", start, end))]
    assert found == [[token] for token in range(100, 130)]
    assert rows(DatasetForCausalLM(prefix, 1, "train", 0.0, 0.5)) == [[token] for token in range(100, 108)]


def test_a_part_by_documents(prefix: Path) -> None:
    found = rows(DatasetForCausalLM(prefix, 4, documents=(4, 7)))
    assert found == [list(range(start, start + 4)) for start in (105, 109, 113, 117)]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"start_weight": 0.0, "end_weight": 0.1}, "not one window"),
        ({"documents": (2, 4)}, "not one window"),
        ({"documents": (2, 4), "tail": "keep"}, "not one window"),
        ({"max_seq_length": 31}, "at least 31 tokens"),
        ({"start_weight": 0.5, "end_weight": 0.5}, "begin before it ends"),
        ({"end_weight": 1.5}, "begin before it ends"),
        ({"documents": (5, 11)}, "no such documents"),
        ({"documents": (0, 5), "end_weight": 0.5}, "weights or by documents"),
        ({"max_seq_length": 0}, "positive"),
        ({"tail": "cut"}, "no such tail"),
        ({"arrangement": "random"}, "no such arrangement"),
        ({"borders": "position_ids"}, "no such mark"),
        ({"borders": ["mask"]}, "no such mark"),
        ({"tail": "pad"}, "pad_token_id"),
        ({"pad_token_id": 0}, "pad_token_id"),
        ({"arrangement": "best_fit"}, "pad_token_id"),
        ({"arrangement": "best_fit", "tail": "drop"}, "are padded"),
        ({"binarization_impl": "fast"}, "mmap, lazy, cached"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(prefix: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        DatasetForCausalLM(prefix, **{"max_seq_length": 8, **options})


def test_a_data_set_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not one window"):
        DatasetForCausalLM(build(tmp_path, [0, 0]), 1)


def test_a_window_that_is_not_there_is_an_index_error(prefix: Path) -> None:
    data = DatasetForCausalLM(prefix, 8)
    for at in (3, -4):
        with pytest.raises(IndexError):
            data[at]


def test_borders_are_said_in_three_ways(prefix: Path) -> None:
    data = DatasetForCausalLM(prefix, 10, borders=("position_ids", "document_ids", "cu_seqlens"))
    # documents of 5, 3, 1, 12, 2, 7 tokens
    assert rows(data, "position_ids") == [
        [0, 1, 2, 3, 4, 0, 1, 2, 0, 0],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        [0, 0, 1, 0, 1, 2, 3, 4, 5, 6],
    ]
    assert rows(data, "document_ids") == [
        [0, 0, 0, 0, 0, 1, 1, 1, 2, 3],
        [0] * 10,
        [0, 1, 1, 2, 2, 2, 2, 2, 2, 2],
    ]
    assert rows(data, "cu_seqlens") == [[0, 5, 8, 9, 10], [0, 10], [0, 1, 3, 10]]
    assert data[0]["cu_seqlens"].dtype == torch.int32
    assert rows(data) == [list(range(start, start + 10)) for start in (100, 110, 120)]
    assert rows(data, "labels")[0] == [100, 101, 102, 103, 104, -100, 106, 107, -100, -100]
    assert rows(data, "labels")[1] == list(range(110, 120))


def test_padding_is_a_document_of_its_own(tmp_path: Path) -> None:
    data = DatasetForCausalLM(
        build(tmp_path, [3, 2]), 8, tail="pad", pad_token_id=7, borders=("position_ids", "document_ids", "cu_seqlens")
    )
    item = data[0]
    assert item["input_ids"].tolist() == [100, 101, 102, 103, 104, 7, 7, 7]
    assert item["labels"].tolist() == [100, 101, 102, -100, 104, -100, -100, -100]
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert item["document_ids"].tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert item["cu_seqlens"].tolist() == [0, 3, 5, 8]


def documents_in(row: list[int], lengths: list[int]) -> list[int]:
    """Which document each token is of."""
    return (np.searchsorted(100 + np.cumsum(lengths), row, "right")).tolist()


def test_shuffled_documents_are_whole_runs_in_another_order_each_epoch(prefix: Path) -> None:
    data = DatasetForCausalLM(prefix, 30, arrangement="shuffled")
    orders = []
    for epoch in range(3):
        data.set_epoch(epoch)
        (row,) = rows(data)
        assert sorted(row) == list(range(100, 130))
        runs = [document for at, document in enumerate(documents_in(row, LENGTHS)) if not at or row[at] != row[at - 1] + 1]
        assert len(set(runs)) == len(runs)  # a document begins once
        orders.append(row)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    data.set_epoch(1)
    assert rows(data) == [orders[1]]
    assert rows(DatasetForCausalLM(prefix, 30, arrangement="shuffled")) == [orders[0]]
    assert rows(DatasetForCausalLM(prefix, 30, arrangement="shuffled", seed=1)) != [orders[0]]
    assert rows(DatasetForCausalLM(prefix, 30, "valid", arrangement="shuffled")) != [orders[0]]


corpora = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(sum)


@settings(max_examples=60, deadline=None)
@given(lengths=corpora, length=st.integers(1, 17), arrangement=st.sampled_from(causal.ARRANGEMENTS), seed=st.integers(0, 5))
def test_every_token_comes_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, arrangement: str, seed: int
) -> None:
    prefix = build(tmp_path_factory.mktemp("data"), lengths)
    tails = ("pad",) if arrangement == "best_fit" else causal.TAILS
    whole = list(range(100, 100 + sum(lengths)))
    for tail in tails:
        if tail == "drop" and sum(lengths) < length:
            continue
        data = DatasetForCausalLM(
            prefix,
            length,
            arrangement=arrangement,
            tail=tail,
            seed=seed,
            pad_token_id=7 if tail == "pad" else None,
            borders=("document_ids", "position_ids"),
        )
        items = [data[at] for at in range(len(data))]
        found = [token for item in items for token in item["input_ids"].tolist() if token != 7]
        left = sum(lengths) % length if tail == "drop" else 0
        assert len(found) == len(whole) - left
        assert len(set(found)) == len(found)
        assert set(found) <= set(whole)
        for item in items:
            tokens = [token for token in item["input_ids"].tolist() if token != 7]
            numbers = item["document_ids"].tolist()[: len(tokens)]
            truth = documents_in(tokens, lengths)
            for at in range(1, len(tokens)):
                assert (numbers[at] == numbers[at - 1]) == (truth[at] == truth[at - 1])
                assert item["position_ids"][at] == (item["position_ids"][at - 1] + 1 if truth[at] == truth[at - 1] else 0)


@settings(max_examples=60, deadline=None)
@given(lengths=corpora, length=st.integers(1, 17))
def test_best_fit_cuts_only_documents_longer_than_a_window(lengths: list[int], length: int) -> None:
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    arrays = best_fit_arrays(bounds, length)
    pieces = list(zip(arrays["starts"].tolist(), arrays["stops"].tolist(), strict=True))
    windows = [pieces[first:stop] for first, stop in pairwise(arrays["firsts"].tolist())]
    assert all(0 < sum(stop - start for start, stop in window) <= length for window in windows)
    expected = [
        (start + at, min(start + at + length, start + size))
        for start, size in zip(bounds[:-1].tolist(), lengths, strict=True)
        for at in range(0, size, length)
    ]
    assert sorted(pieces) == sorted(expected)


def test_best_fit_leaves_the_least_room(tmp_path: Path) -> None:
    data = DatasetForCausalLM(build(tmp_path, [3, 7, 6, 5, 4, 5, 23]), 10, arrangement="best_fit", pad_token_id=0)
    filled = sorted(item["attention_mask"].sum().item() for item in (data[at] for at in range(len(data))))
    assert filled == [3, 10, 10, 10, 10, 10]


def test_a_data_set_can_be_pickled_with_its_epoch(prefix: Path) -> None:
    data = DatasetForCausalLM(prefix, 8, arrangement="shuffled", borders=("cu_seqlens",))
    data.set_epoch(3)
    assert rows(pickle.loads(pickle.dumps(data))) == rows(data)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_data_loader_give_the_same_and_see_the_epoch(prefix: Path, persistent: bool) -> None:
    data = DatasetForCausalLM(prefix, 8, arrangement="shuffled")
    loader = torch.utils.data.DataLoader(data, batch_size=1, num_workers=1, persistent_workers=persistent)
    for epoch in (0, 1):
        data.set_epoch(epoch)
        assert [batch["input_ids"][0].tolist() for batch in loader] == rows(data)


def test_state_brings_the_epoch_back_and_fits_only_the_same_windows(prefix: Path) -> None:
    data, other = (DatasetForCausalLM(prefix, 8, arrangement="shuffled") for _ in range(2))
    data.set_epoch(5)
    other.load_state_dict(data.state_dict())
    assert rows(other) == rows(data)
    with pytest.raises(DataError, match="other windows"):
        DatasetForCausalLM(prefix, 4, arrangement="shuffled").load_state_dict(data.state_dict())


@pytest.mark.parametrize("arrangement", ["shuffled", "best_fit"])
def test_what_is_cached_gives_the_same_windows(prefix: Path, monkeypatch: pytest.MonkeyPatch, arrangement: str) -> None:
    pad = 0 if arrangement == "best_fit" else None
    expected = rows(DatasetForCausalLM(prefix, 8, arrangement=arrangement, pad_token_id=pad))
    monkeypatch.setattr(causal, "_WORTH_CACHING", 0)
    for _ in range(2):
        assert rows(DatasetForCausalLM(prefix, 8, arrangement=arrangement, pad_token_id=pad)) == expected
        assert len(list((prefix.parent / ".set.cache").iterdir())) == 1
        monkeypatch.setattr("oslo_engine.data.causal.shuffled_arrays", None)  # not computed again
        monkeypatch.setattr("oslo_engine.data.causal.best_fit_arrays", None)


def test_other_content_under_the_same_name_is_not_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal, "_WORTH_CACHING", 0)
    first = rows(DatasetForCausalLM(build(tmp_path, [4, 4, 4]), 4, arrangement="shuffled"))
    second = rows(DatasetForCausalLM(build(tmp_path, [2, 6, 3, 1]), 4, arrangement="shuffled"))
    assert sorted(sum(second, [])) == sorted(sum(first, []))  # noqa: RUF017
    assert len(list((tmp_path / ".set.cache").iterdir())) == 2
