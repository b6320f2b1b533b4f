"""With a real Megatron-Core: its builder writes the same bytes, it reads our files, and we read its.

Also data sets of Hugging Face datasets, and Trainer. All of these are installed by ``make test-slow``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpora import byte_level_bpe, expected_ids, texts
from oslo_engine import DatasetForCausalLM, DatasetPreprocessor, IndexedDataset, IndexedDatasetBuilder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def theirs() -> Any:
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")


def drawn(dtype: str, seed: int) -> list[list[list[int]]]:
    """Documents of no, one or many sequences; some sequences are empty."""
    chance = np.random.default_rng(seed)
    largest = 65_536 if dtype == "uint16" else 200_000
    documents = [
        [chance.integers(0, largest, int(size)).tolist() for size in chance.integers(0, 40, int(chance.integers(0, 5)))]
        for _ in range(400)
    ]
    documents[0], documents[-1] = [], []
    return documents


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("by_item", [False, True])
def test_builders_write_the_same_bytes(theirs: Any, tmp_path: Path, dtype: str, by_item: bool) -> None:
    documents = drawn(dtype, seed=int(by_item))
    their_builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=getattr(np, dtype))
    with IndexedDatasetBuilder(tmp_path / "ours", dtype=dtype) as our_builder:
        for document in documents:
            tokens, lengths = [token for sequence in document for token in sequence], [len(each) for each in document]
            if by_item:
                for sequence in document:
                    their_builder.add_item(torch.tensor(sequence, dtype=torch.int64))
                    our_builder.add_item(sequence)
                their_builder.end_document()
                our_builder.end_document()
            else:
                their_builder.add_document(tokens, lengths)
                our_builder.add_document(tokens, lengths)
    their_builder.finalize(str(tmp_path / "theirs.idx"))
    for end in (".bin", ".idx"):
        assert (tmp_path / f"ours{end}").read_bytes() == (tmp_path / f"theirs{end}").read_bytes()
    for implementation in ("mmap", "lazy", "cached"):
        ours = IndexedDataset(tmp_path / "theirs", implementation)
        sequences = [sequence for document in documents for sequence in document]
        assert [ours[at].tolist() for at in range(len(ours))] == sequences


def test_joined_files_are_the_same_bytes(theirs: Any, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        with IndexedDatasetBuilder(tmp_path / name, dtype="uint16") as builder:
            for document in drawn("uint16", seed):
                builder.add_document([token for each in document for token in each], [len(each) for each in document])
    their_builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    with IndexedDatasetBuilder(tmp_path / "ours", dtype="uint16") as builder:
        for name in ("a", "b"):
            their_builder.add_index(str(tmp_path / name))
            builder.add_index(tmp_path / name)
    their_builder.finalize(str(tmp_path / "theirs.idx"))
    for end in (".bin", ".idx"):
        assert (tmp_path / f"ours{end}").read_bytes() == (tmp_path / f"theirs{end}").read_bytes()


@pytest.mark.parametrize("mmap", [True, False])
def test_megatron_reads_what_preprocess_writes(theirs: Any, tmp_path: Path, mmap: bool) -> None:
    tokenizer, documents = byte_level_bpe(), [*texts(150), "end"]
    made = DatasetPreprocessor(tokenizer, append_eod=True, eod_token_id=0, workers=2, chunk_size=5000)
    made.preprocess(documents, tmp_path / "out")
    data = theirs.IndexedDataset(str(tmp_path / "out"), mmap=mmap)
    bounds = data.document_indices
    found = [[token for at in range(first, stop) for token in data[at].tolist()] for first, stop in zip(bounds, bounds[1:])]  # noqa: B905, RUF007
    assert found == expected_ids(tokenizer, documents)


def test_preprocess_writes_what_megatron_s_loop_would(theirs: Any, tmp_path: Path) -> None:
    """The loop of its script: sentences without tokens are left out, the end of document goes to the last one."""
    tokenizer = byte_level_bpe()
    documents = [*texts(80), ["one. ", "", "two."], [""], ["three"]]
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=theirs.DType.optimal_dtype(600))
    for document in documents:
        ids, lengths = [], []
        for sentence in document if isinstance(document, list) else [document]:
            found = tokenizer.encode(sentence).ids
            if found:
                ids.extend(found)
                lengths.append(len(found))
        if ids:
            ids.append(0)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(str(tmp_path / "theirs.idx"))
    made = DatasetPreprocessor(tokenizer, append_eod=True, eod_token_id=0, workers=0, chunk_size=5000)
    made.preprocess(documents, tmp_path / "ours")
    for end in (".bin", ".idx"):
        assert (tmp_path / f"ours{end}").read_bytes() == (tmp_path / f"theirs{end}").read_bytes()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_hugging_face_data_set_is_preprocessed(tmp_path: Path, streamed: bool) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    documents = texts(120)
    table = datasets.Dataset.from_dict({"body": documents, "other": list(range(120))})
    source = table.to_iterable_dataset() if streamed else table
    made = DatasetPreprocessor(byte_level_bpe(), workers=0, chunk_size=3000)
    data = made.preprocess(source, tmp_path / "out", json_key="body")
    expected = expected_ids(byte_level_bpe(), documents, eod=None)
    assert [data.document(at).tolist() for at in range(120)] == expected
    with pytest.raises(ValueError, match="no such column"):
        made.preprocess(source, tmp_path / "other")
    with pytest.raises(ValueError, match="several data sets"):
        made.preprocess(datasets.DatasetDict({"train": table}), tmp_path / "other")


def test_trainer_trains_on_windows(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    DatasetPreprocessor(byte_level_bpe(), append_eod=True, eod_token_id=0, workers=0).preprocess(texts(400), tmp_path / "out")
    data = DatasetForCausalLM(tmp_path / "out", 32, arrangement="shuffled", borders=("position_ids",))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=600, n_embd=32, n_layer=1, n_head=2, n_positions=32))
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=30,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        dataloader_num_workers=1,
        save_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
