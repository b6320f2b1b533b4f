"""From texts to files: the tokens are those of a plain loop, from any source, with any number of workers."""

from __future__ import annotations

import gzip
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from corpora import byte_level_bpe, expected_ids, texts, write_jsonl
from oslo_engine import DataError, DatasetPreprocessor, IndexedDataset
from oslo_engine.data import lines, tokenizing, workers
from preparing import Letters

DOCUMENTS = texts(120)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_bpe()


def preprocessor(tokenizer: Any, **options: Any) -> DatasetPreprocessor:
    return DatasetPreprocessor(
        tokenizer, **{"append_eod": True, "eod_token_id": 0, "workers": 0, "chunk_size": 4000, **options}
    )


def documents_of(data: IndexedDataset) -> list[list[int]]:
    return [data.document(at).tolist() for at in range(data.num_documents)]


def compressed(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":  # of two members, as `cat a.gz b.gz` makes
        path.write_bytes(gzip.compress(content[:1000]) + gzip.compress(content[1000:]))
    elif path.suffix == ".zst":
        import zstandard

        compressor = zstandard.ZstdCompressor()
        path.write_bytes(compressor.compress(content[:1000]) + compressor.compress(content[1000:]))
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_json_lines_become_what_a_plain_loop_makes_of_them(tokenizer: Tokenizer, tmp_path: Path, end: str, fast: bool) -> None:
    content = write_jsonl(tmp_path / "plain", DOCUMENTS).read_bytes()
    source = compressed(tmp_path / f"a.jsonl{end}", content)
    made = preprocessor(tokenizer, fast=fast)
    data = made.preprocess(made.open_jsonl(source), tmp_path / "out")
    assert documents_of(data) == expected_ids(tokenizer, DOCUMENTS)
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["fast_path"] is fast
    assert manifest["counts"]["documents"] == len(DOCUMENTS)
    assert manifest["counts"]["text_bytes"] == sum(len(text.encode()) for text in DOCUMENTS)


@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_each_line_of_a_text_is_a_document(tokenizer: Tokenizer, tmp_path: Path, end: str) -> None:
    rows = [text.replace("\n", " ").replace("\r", " ") for text in DOCUMENTS]
    content = "\ufeff".encode() + "\r\n".join(rows[:60]).encode() + b"\n" + "\n".join(rows[60:]).encode()
    source = compressed(tmp_path / f"a.txt{end}", content)
    data = preprocessor(tokenizer).preprocess(str(source), tmp_path / "out")
    expected = expected_ids(tokenizer, rows)
    assert documents_of(data) == (expected if rows[-1] else expected[:-1])


def test_an_iterable_and_an_open_file_become_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [text.replace("\n", " ") for text in DOCUMENTS]
    expected = expected_ids(tokenizer, rows)
    file = io.StringIO("\n".join(rows) + "\n", newline="\n")
    for number, source in enumerate((rows, tuple(rows), iter(rows), file)):
        assert documents_of(preprocessor(tokenizer).preprocess(source, tmp_path / f"out{number}")) == expected


def test_a_list_of_texts_is_a_document_of_several_sequences(tokenizer: Tokenizer, tmp_path: Path) -> None:
    documents = [["one two", "", "three"], [], ["four"], "five", [""]]
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    data = preprocessor(tokenizer).preprocess(source, tmp_path / "out")
    assert documents_of(data) == expected_ids(tokenizer, documents)
    one, two, three, four, five = (len(tokenizer.encode(text).ids) for text in ("one two", "three", "four", "five", ""))
    assert five == 0
    # As in Megatron: texts without tokens are no sequences, the end of document belongs to the last one.
    assert data.index.lengths.tolist() == [one, two + 1, three + 1, four + 1]
    assert data.index.documents.tolist() == [0, 2, 2, 3, 4, 4]
    assert documents_of(preprocessor(tokenizer).preprocess(documents, tmp_path / "other")) == documents_of(data)


def test_parquet_and_its_missing_column(tokenizer: Tokenizer, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": DOCUMENTS, "n": list(range(120))}), tmp_path / "a.parquet", row_group_size=17)
    data = preprocessor(tokenizer).preprocess(tmp_path / "a.parquet", tmp_path / "out", json_key="body")
    assert documents_of(data) == expected_ids(tokenizer, DOCUMENTS)
    with pytest.raises(DataError, match="body, n"):
        preprocessor(tokenizer).preprocess(tmp_path / "a.parquet", tmp_path / "other")


def test_folders_and_wildcards_are_read_in_order_of_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write_jsonl(tmp_path / "in" / "b.jsonl", DOCUMENTS[40:80])
    compressed(tmp_path / "in" / "a.jsonl.gz", write_jsonl(tmp_path / "x", DOCUMENTS[:40]).read_bytes())
    write_jsonl(tmp_path / "in" / "deep" / "c.jsonl", DOCUMENTS[80:])
    (tmp_path / "in" / "README.md").write_text("not a corpus")
    (tmp_path / "in" / ".ipynb_checkpoints").mkdir()
    for hidden in (".a.txt", ".ipynb_checkpoints/b.txt"):
        (tmp_path / "in" / hidden).write_text("hidden")
    for number, source in enumerate((str(tmp_path / "in"), [tmp_path / "in" / "*.jsonl*", tmp_path / "in" / "deep"])):
        data = preprocessor(tokenizer).preprocess(source, tmp_path / f"out{number}")
        assert documents_of(data) == expected_ids(tokenizer, DOCUMENTS)


def test_workers_and_chunks_change_no_byte(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    compressed(tmp_path / "a.jsonl.gz", source.read_bytes())
    found = set()
    for number, (count, chunk, name) in enumerate(
        [(0, 4000, "a.jsonl"), (2, 4000, "a.jsonl"), (0, 1, "a.jsonl"), (1, 1 << 20, "a.jsonl"), (2, 5000, "a.jsonl.gz")]
    ):
        made = preprocessor(tokenizer, workers=count, chunk_size=chunk)
        made.preprocess(tmp_path / name, tmp_path / f"out{number}")
        found.add(tuple((tmp_path / f"out{number}{end}").read_bytes() for end in (".bin", ".idx")))
    assert len(found) == 1


@pytest.mark.parametrize("key", [None, "text"])
def test_long_lines_are_read_in_parts(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setattr(lines, "LONG_LINE", 3000)
    monkeypatch.setattr(lines, "_BLOCK", 700)
    monkeypatch.setattr("oslo_engine.data.long_json._KEPT", 50)
    monkeypatch.setattr(tokenizing, "_PIECE", 500)
    windows = lines.LongLine.windows
    monkeypatch.setattr(lines.LongLine, "windows", lambda line, size=97: windows(line, size))
    long = [" ".join(texts(30, seed)).replace("\r", "") for seed in range(6)] + ["x" * 4000, "😀" * 2000, "a b " * 2000]
    documents = [text for pair in zip(DOCUMENTS, [*long, *[""] * 111], strict=True) for text in pair]
    if key is None:
        documents = [text.replace("\n", " ") for text in documents]
        source = tmp_path / "a.txt"
        source.write_text("\n".join(documents) + "\n", encoding="utf-8")
    else:
        source = write_jsonl(tmp_path / "a.jsonl", documents)
    cut: list[Any] = []
    pieces_of = tokenizing.pieces_of
    monkeypatch.setattr("oslo_engine.data.encoding.pieces_of", lambda parts: cut.append(0) or pieces_of(parts))
    data = preprocessor(tokenizer).preprocess(source, tmp_path / "out")
    assert documents_of(data) == expected_ids(tokenizer, documents)
    assert len(cut) >= len(long)


def test_a_type_of_four_bytes_where_the_vocabulary_needs_it(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    tokenizer.add_tokens([f"<{number}>" for number in range(65500 - tokenizer.get_vocab_size())])
    data = preprocessor(tokenizer).preprocess(["a <64000>"], tmp_path / "out")
    assert data.index.dtype.itemsize == 4
    assert documents_of(data) == expected_ids(tokenizer, ["a <64000>"])


def test_end_of_document_is_the_tokenizer_s_own_or_the_one_given(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    assert DatasetPreprocessor(fast, append_eod=True).eod == 0
    assert DatasetPreprocessor(fast, append_eod=True, eod_token_id=5).eod == 5
    assert DatasetPreprocessor(fast).eod is None
    data = DatasetPreprocessor(fast, workers=0).preprocess(["a b", "c"], tmp_path / "out")
    assert documents_of(data) == expected_ids(tokenizer, ["a b", "c"], eod=None)
    for options in ({}, {"eod_token_id": 600}, {"eod_token_id": -1}):
        with pytest.raises(DataError, match="eod_token_id"):
            DatasetPreprocessor(tokenizer, append_eod=True, **options)
    with pytest.raises(DataError, match="documents are not ended with it"):
        DatasetPreprocessor(tokenizer, eod_token_id=0)


@pytest.mark.parametrize("count", [0, 1])
def test_any_other_tokenizer_is_used_by_its_encode(tmp_path: Path, count: int) -> None:
    data = DatasetPreprocessor(Letters(), append_eod=True, workers=count).preprocess(["ab", "", "c"], tmp_path / "out")
    assert documents_of(data) == [[97, 98, 1], [], [99, 1]]


def test_a_transformers_tokenizer_that_changes_what_it_wraps_is_used_by_its_own_encode(tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    class Upper(PreTrainedTokenizerFast):
        def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
            return super().encode(text.upper(), *args, **options)

    assert tokenizing.tokenizer_data(PreTrainedTokenizerFast(tokenizer_object=tokenizer)).is_json
    assert tokenizing._same(Upper(tokenizer_object=tokenizer), tokenizer) is False


# -- bad input

GOOD = b'{"text": "fine"}\n'
BAD_LINES = {
    "utf-8": (b'{"text": "\xff"}', "not valid UTF-8"),
    "json": (b'{"text": "a"', "not valid JSON"),
    "not json": (b"hello", "not valid JSON"),
    "missing key": (b'{"txt": "a"}', "no key 'text'; there are: 'txt'"),
    "null": (b'{"text": null}', "there is nothing"),
    "number": (b'{"text": 5}', "there is a int"),
    "list of numbers": (b'{"text": ["a", 5]}', "there is a int"),
    "no object": (b'["a"]', "a JSON object was expected, this is a list"),
    "half a character": (b'{"text": "a\\ud800b"}', "half a character"),
    "utf-8 in a longer text": (b'{"text": "aaaaaaaaa\xff"}', "not valid UTF-8"),
    "half a character in a longer text": (b'{"text": "aaaaaaaaa\\ud800"}', "half a character"),
    "text without end": (b'{"text": "aaaaaaaaaaa', "not valid JSON"),
    "control character": (b'{"text": "aaaaaaa\taaaaaaa"}', "not valid JSON"),
    "nested": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
}


@pytest.mark.parametrize(("line", "complaint"), BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("end", ["", ".gz"])
def test_a_bad_record_is_named_with_its_line_or_left_out(
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: bytes,
    complaint: str,
    long: bool,
    end: str,
) -> None:
    if long:
        monkeypatch.setattr(lines, "LONG_LINE", 4)
        monkeypatch.setattr(lines, "_BLOCK", 3)
        monkeypatch.setattr("oslo_engine.data.long_json._KEPT", 4)
    source = compressed(tmp_path / f"a.jsonl{end}", GOOD * 7 + line + b"\n" + GOOD * 3)
    with pytest.raises(DataError, match=complaint) as caught:
        preprocessor(tokenizer, chunk_size=20).preprocess(source, tmp_path / "out")
    assert caught.value.where == f"{source}:8"
    assert not (tmp_path / "out.idx").exists()
    data = preprocessor(tokenizer, chunk_size=20, on_error="skip").preprocess(source, tmp_path / "out")
    assert documents_of(data) == expected_ids(tokenizer, ["fine"] * 10)
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["counts"]["skipped"] == 1
    assert [each["where"] for each in manifest["left_out"]] == [f"{source}:8"]
    assert complaint.split(";")[0] in manifest["left_out"][0]["complaint"]


def test_bad_bytes_in_a_text_file_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\xc3(\nfine\n")
    with pytest.raises(DataError, match=r"UTF-8: invalid continuation byte at byte 0") as caught:
        preprocessor(tokenizer).preprocess(tmp_path / "a.txt", tmp_path / "out")
    assert caught.value.where == f"{tmp_path / 'a.txt'}:2"


@pytest.mark.parametrize("item", [None, 5, b"bytes", ["a", None], {"text": "a"}], ids=str)
def test_an_item_that_is_no_text_is_named(tokenizer: Tokenizer, tmp_path: Path, item: Any) -> None:
    with pytest.raises(DataError, match="a text or a list of texts") as caught:
        preprocessor(tokenizer).preprocess(["fine", item], tmp_path / "out")
    assert caught.value.where == "list, item 1"


@pytest.mark.parametrize("end", [".gz", ".zst"])
@pytest.mark.parametrize("left", [0.5, 0.99])
def test_a_compressed_file_that_was_cut_short_is_an_error(tokenizer: Tokenizer, tmp_path: Path, end: str, left: float) -> None:
    source = compressed(tmp_path / f"a.txt{end}", "\n".join(DOCUMENTS).encode())
    source.write_bytes(source.read_bytes()[: int(source.stat().st_size * left)])
    with pytest.raises(DataError, match="cut short") as caught:
        preprocessor(tokenizer).preprocess(source, tmp_path / "out")
    assert caught.value.where == str(source)
    assert not (tmp_path / "out.idx").exists()


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_a_compressed_file_that_is_damaged_is_an_error(tokenizer: Tokenizer, tmp_path: Path, end: str) -> None:
    (tmp_path / f"a.txt{end}").write_bytes(b"this is not compressed at all")
    with pytest.raises(DataError, match="damaged"):
        preprocessor(tokenizer).preprocess(tmp_path / f"a.txt{end}", tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "options", "complaint"),
    [
        ("nothing/here.jsonl", {}, "no such file"),
        ("*.jsonl", {}, "no such file"),
        ("folder", {}, "no file of a known kind"),
        ("file.md", {}, "not clear what kind"),
        ("file.md", {"file_format": "docx"}, "no such kind"),
        (5, {}, "nothing to iterate"),
        ({"train": ["a"]}, {}, "several data sets"),
    ],
    ids=str,
)
def test_a_source_that_is_none_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, source: Any, options: dict[str, Any], complaint: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.md").write_text("a\n")
    given = str(tmp_path / source) if isinstance(source, str) else source
    with pytest.raises(DataError, match=complaint):
        preprocessor(tokenizer).preprocess(given, tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"on_error": "ignore"}, "stop or skip"),
        ({"binarization_impl": "fast"}, "mmap, lazy, cached"),
        ({"workers": -1}, "no workers"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(tokenizer: Tokenizer, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        preprocessor(tokenizer, **options)


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(DataError, match="no tokenizer"):
        DatasetPreprocessor("gpt2")


def test_an_error_from_a_worker_arrives(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD * 30 + b"{\n" + GOOD * 30)
    with pytest.raises(DataError, match="not valid JSON") as caught:
        preprocessor(tokenizer, workers=2, chunk_size=50).preprocess(tmp_path / "a.jsonl", tmp_path / "out")
    assert caught.value.where == f"{tmp_path / 'a.jsonl'}:31"


def test_a_worker_that_dies_is_an_error_and_leaves_no_other(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    give = workers._Worker.give

    def give_and_kill(worker: Any, unit: Any) -> None:
        started.append(worker._process)
        give(worker, unit)
        if len(started) == 3:
            worker._process.kill()

    monkeypatch.setattr(workers._Worker, "give", give_and_kill)
    with pytest.raises(DataError, match="a worker died"):
        preprocessor(tokenizer, workers=2, chunk_size=500).preprocess(
            write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "out"
        )
    assert all(process.poll() is not None for process in started)
    assert not (tmp_path / "out.idx").exists()


@pytest.mark.parametrize("count", [0, 1])
def test_a_tokenizer_that_fails_is_named(tmp_path: Path, count: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    with pytest.raises(DataError, match="the tokenizer failed"):
        DatasetPreprocessor(tokenizer, workers=count).preprocess(["b"], tmp_path / "out")


# -- again, and instead


def test_a_data_set_that_is_there_is_kept_unless_told_otherwise(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    preprocessor(tokenizer).preprocess(source, tmp_path / "out")
    before = (tmp_path / "out.idx").stat().st_mtime_ns
    with caplog.at_level(logging.WARNING, "oslo_engine"):
        again = preprocessor(tokenizer).preprocess(source, tmp_path / "out")
    assert "already" in caplog.text
    assert again.num_documents == len(DOCUMENTS)
    assert (tmp_path / "out.idx").stat().st_mtime_ns == before
    with pytest.raises(DataError, match="made of something else"):
        preprocessor(tokenizer, append_eod=False, eod_token_id=None).preprocess(source, tmp_path / "out")
    with pytest.raises(DataError, match="perhaps of other documents"):
        preprocessor(tokenizer).preprocess(["other"], tmp_path / "out")
    data = preprocessor(tokenizer).preprocess(["other"], tmp_path / "out", overwrite=True)
    assert documents_of(data) == expected_ids(tokenizer, ["other"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.bin", "out.idx", "out.manifest.json"]


def test_two_at_once_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def source() -> Any:
        yield "a"
        preprocessor(tokenizer).preprocess(["b"], tmp_path / "out")

    with pytest.raises(DataError, match="another process"):
        preprocessor(tokenizer, chunk_size=1).preprocess(source(), tmp_path / "out")


def test_progress_is_reported(tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    seen: list[tuple[int, int | None]] = []
    with caplog.at_level(logging.INFO, "oslo_engine"):
        preprocessor(tokenizer).preprocess(
            source, tmp_path / "out", 50, report=lambda done, total: seen.append((done.source_bytes, total))
        )
    size = source.stat().st_size
    assert seen == [(min(at + 4000, size), size) for at in range(0, size, 4000)]
    assert sum("documents, " in record.getMessage() for record in caplog.records) == 2
