"""Megatron's indexed format: what is written byte for byte, what is read, and which damage is noticed."""

from __future__ import annotations

import gc
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from oslo_engine import DataError, IndexedDataset, IndexedDatasetBuilder
from oslo_engine.data.format import dtype_for

DOCUMENTS = [[], [[5, 6, 7], [8]], [[9]], [], [[1, 2], [], [3]], []]
FLAT = [[], [5, 6, 7, 8], [9], [], [1, 2, 3], []]
IMPLEMENTATIONS = ("mmap", "lazy", "cached")


def build(prefix: Path, documents: list[list[list[int]]], **options: object) -> Path:
    with IndexedDatasetBuilder(prefix, **options) as builder:  # type: ignore[arg-type]
        for document in documents:
            builder.add_document([token for sequence in document for token in sequence], [len(each) for each in document])
    return prefix


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return build(tmp_path / "set", DOCUMENTS, vocab_size=100)


def test_files_are_what_the_format_says(prefix: Path) -> None:
    assert prefix.with_suffix(".bin").read_bytes() == struct.pack("<8H", 5, 6, 7, 8, 9, 1, 2, 3)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 6, 7)
    expected += struct.pack("<6i", 3, 1, 1, 2, 0, 1) + struct.pack("<6q", 0, 6, 8, 10, 14, 14)
    expected += struct.pack("<7q", 0, 0, 2, 3, 3, 6, 6)
    assert prefix.with_suffix(".idx").read_bytes() == expected
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["set.bin", "set.idx"]


@pytest.mark.parametrize(("size", "code"), [(100, 8), (65499, 8), (65500, 4), (65536, 4), (200000, 4)])
def test_type_of_a_token_is_the_one_megatron_chooses(tmp_path: Path, size: int, code: int) -> None:
    build(tmp_path / "a", [[[1]]], vocab_size=size)
    assert (tmp_path / "a.idx").read_bytes()[17] == code
    assert dtype_for(size).itemsize == (2 if code == 8 else 4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_reader_gives_every_sequence_and_document(prefix: Path, implementation: str) -> None:
    data = IndexedDataset(prefix, implementation)
    assert [data[at].tolist() for at in range(len(data))] == [each for document in DOCUMENTS for each in document]
    assert [data.document(at).tolist() for at in range(data.num_documents)] == FLAT
    assert data.document(-2).tolist() == [1, 2, 3]
    assert data.read(2, 6).tolist() == [7, 8, 9, 1]
    assert (data.num_documents, data.num_tokens) == (6, 8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_was_read_outlives_the_data_set(prefix: Path, implementation: str) -> None:
    tokens = IndexedDataset(prefix, implementation)[0]
    gc.collect()
    assert tokens.tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_data_set_can_be_pickled(prefix: Path, implementation: str) -> None:
    assert pickle.loads(pickle.dumps(IndexedDataset(prefix, implementation)))[0].tolist() == [5, 6, 7]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_empty_data_set_opens(tmp_path: Path, implementation: str) -> None:
    data = IndexedDataset(build(tmp_path / "a", [[], []], vocab_size=10), implementation)
    assert (len(data), data.num_documents, data.num_tokens) == (0, 2, 0)
    assert data.document(1).tolist() == []


def test_items_and_their_document_ends_write_the_same_files(prefix: Path, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "b", vocab_size=100) as builder:
        for document in DOCUMENTS:
            for sequence in document:
                builder.add_item(np.array(sequence, np.int64))
            builder.end_document()
    for end in (".bin", ".idx"):
        assert (tmp_path / f"b{end}").read_bytes() == prefix.with_suffix(end).read_bytes()


def test_joined_data_sets_are_those_of_all_documents(tmp_path: Path) -> None:
    build(tmp_path / "a", DOCUMENTS[:3], vocab_size=100)
    build(tmp_path / "b", DOCUMENTS[3:], vocab_size=100)
    build(tmp_path / "whole", DOCUMENTS, vocab_size=100)
    with IndexedDatasetBuilder(tmp_path / "joined", vocab_size=100) as builder:
        builder.add_index(tmp_path / "a")
        builder.add_index(tmp_path / "b.bin")
    for end in (".bin", ".idx"):
        assert (tmp_path / f"joined{end}").read_bytes() == (tmp_path / f"whole{end}").read_bytes()


def test_data_sets_of_different_types_are_not_joined(tmp_path: Path) -> None:
    build(tmp_path / "a", [[[1]]], vocab_size=70000)
    with IndexedDatasetBuilder(tmp_path / "b", vocab_size=10) as builder, pytest.raises(DataError, match="different types"):
        builder.add_index(tmp_path / "a")


@pytest.mark.parametrize("token", [70000, 65536, -1])
def test_a_token_that_does_not_fit_is_an_error_and_nothing_is_written(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match="does not fit"):
        build(tmp_path / "a", [[[1, token]]], vocab_size=60000)
    assert list(tmp_path.iterdir()) == []


def test_the_largest_token_of_two_bytes_is_kept(tmp_path: Path) -> None:
    assert IndexedDataset(build(tmp_path / "a", [[[65535]]], dtype="uint16"))[0].tolist() == [65535]


def test_lengths_must_add_up(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not add up"), IndexedDatasetBuilder(tmp_path / "a", vocab_size=10) as builder:
        builder.add_document([1, 2, 3], [1, 1])


def test_tokens_must_be_integers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="integers"):
        build(tmp_path / "a", [[[1.5]]], vocab_size=10)  # type: ignore[list-item]


def test_an_exception_in_a_build_leaves_the_old_files(prefix: Path) -> None:
    before = prefix.with_suffix(".idx").read_bytes()
    with pytest.raises(DataError, match="does not fit"):
        build(prefix, [[[1]], [[70000]]], vocab_size=100)
    assert prefix.with_suffix(".idx").read_bytes() == before
    assert IndexedDataset(prefix).num_tokens == 8


def put(file: Path, at: int, content: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[at : at + len(content)] = content
    file.write_bytes(data)


DAMAGES = {
    "bin cut short": (".bin", lambda file: file.write_bytes(file.read_bytes()[:-1]), "15 bytes"),
    "bin longer": (".bin", lambda file: file.write_bytes(file.read_bytes() + b"xx"), "do not fit"),
    "bin missing": (".bin", lambda file: file.unlink(), "cannot open the tokens"),
    "idx missing": (".idx", lambda file: file.unlink(), "cannot open the index"),
    "idx empty": (".idx", lambda file: file.write_bytes(b""), "not an index"),
    "idx cut short": (".idx", lambda file: file.write_bytes(file.read_bytes()[:-8]), "wrong size"),
    "foreign": (".idx", lambda file: put(file, 0, b"TNTIDX"), "not an index"),
    "version 2": (".idx", lambda file: put(file, 9, b"\x02"), "version 2"),
    "type 9": (".idx", lambda file: put(file, 17, b"\x09"), "type 9"),
    "negative length": (".idx", lambda file: put(file, 34, struct.pack("<i", -3)), "negative length"),
    "a length changed": (".idx", lambda file: put(file, 34, struct.pack("<i", 2)), "follow one another"),
    "an offset changed": (".idx", lambda file: put(file, 34 + 24 + 8, struct.pack("<q", 8)), "follow one another"),
    "documents in disorder": (".idx", lambda file: put(file, 34 + 72 + 16, struct.pack("<q", 5)), "not in order"),
    "documents end early": (".idx", lambda file: put(file, 34 + 72 + 48, struct.pack("<q", 5)), "cover"),
}


@pytest.mark.parametrize(("end", "damage", "complaint"), DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_damage_is_an_error_that_names_the_file(prefix: Path, end: str, damage, complaint: str, implementation: str) -> None:
    file = prefix.with_suffix(end)
    damage(file)
    with pytest.raises(DataError, match=complaint) as caught:
        IndexedDataset(prefix, implementation)
    assert caught.value.where == str(file)


def test_a_file_cut_short_while_it_is_read_lazily_is_an_error(prefix: Path) -> None:
    data = IndexedDataset(prefix, "lazy")
    prefix.with_suffix(".bin").write_bytes(b"1234")
    with pytest.raises(DataError, match="cut short"):
        data.read(0, 8)


def test_unknown_reader_and_sequences_that_are_not_there(prefix: Path) -> None:
    with pytest.raises(DataError, match="mmap, lazy, cached"):
        IndexedDataset(prefix, "fast")
    data = IndexedDataset(prefix)
    for read in (lambda: data[6], lambda: data[-7], lambda: data.document(6), lambda: data.document(-7)):
        with pytest.raises(IndexError):
            read()
