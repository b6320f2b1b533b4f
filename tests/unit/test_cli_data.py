"""``oslo-engine preprocess`` and ``oslo-engine data``, called in this process: what they write and print, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from corpora import byte_level_bpe, expected_ids, texts, write_jsonl
from oslo_engine import IndexedDataset, IndexedDatasetBuilder
from oslo_engine.cli.main import main

DOCUMENTS = [*texts(40), "a last one"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def said(ran: Result) -> str:
    assert ran.exit_code == 0, ran.output
    return " ".join(ran.output.split())


def refused(ran: Result, *complaints: str) -> None:
    assert ran.exit_code == 2, ran.output
    assert ran.output.startswith("error: ")
    for complaint in complaints:
        assert complaint in ran.output


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_level_bpe().save(str(path))
    return path


@pytest.fixture
def made(tokenizer: Path, tmp_path: Path) -> Path:
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS, key="body")
    options = ("--json-key", "body", "--append-eod", "--eod-token-id", 0, "--workers", 0)
    words = said(run("preprocess", source, "--tokenizer", tokenizer, "--output", tmp_path / "out", *options))
    assert words == f"{tmp_path / 'out'}: 41 documents, {IndexedDataset(tmp_path / 'out').num_tokens} tokens of uint16"
    return tmp_path / "out"


def test_preprocess_writes_what_the_tokenizer_says(made: Path) -> None:
    data = IndexedDataset(made)
    assert [data.document(at).tolist() for at in range(41)] == expected_ids(byte_level_bpe(), DOCUMENTS)


def test_preprocess_again_keeps_what_is_there_or_replaces_it(made: Path, tokenizer: Path) -> None:
    again = ("preprocess", made.with_name("a.jsonl"), "--tokenizer", tokenizer, "--output", made, "--json-key", "body")
    refused(run(*again, "--workers", 0), "made of something else", "--overwrite")
    assert "41 documents" in said(run(*again, "--workers", 0, "--overwrite"))


def test_preprocess_reads_a_tokenizer_from_a_folder(tokenizer: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<|endoftext|>").save_pretrained(tmp_path / "t")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    options = ("--append-eod", "--workers", 0)
    said(run("preprocess", tmp_path / "a.txt", "--tokenizer", tmp_path / "t", "--output", tmp_path / "out", *options))
    data = IndexedDataset(tmp_path / "out")
    assert [data.document(at).tolist() for at in (0, 1)] == expected_ids(byte_level_bpe(), ["one", "two"])


def test_preprocess_names_what_is_wrong(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nno json\n')
    usual = ("--output", tmp_path / "out", "--workers", 0)
    refused(run("preprocess", tmp_path / "b.txt", "--tokenizer", tokenizer, *usual), "no such file", "b.txt")
    refused(
        run("preprocess", tmp_path / "a.jsonl", "--tokenizer", tokenizer, *usual), "a.jsonl:2", "not valid JSON", "--on-error"
    )
    refused(run("preprocess", tmp_path / "a.jsonl", "--tokenizer", tmp_path / "x.json", *usual), "cannot read a tokenizer")
    refused(run("preprocess", tmp_path / "a.jsonl", "--tokenizer", tmp_path / "none", *usual), "cannot load a tokenizer")
    refused(run("preprocess", tmp_path / "a.jsonl", "--tokenizer", tokenizer, *usual, "--append-eod"), "eod_token_id")
    words = said(run("preprocess", tmp_path / "a.jsonl", "--tokenizer", tokenizer, *usual, "--on-error", "skip"))
    assert words.endswith("of uint16, 1 records left out")


def test_info_says_what_is_there(made: Path) -> None:
    words = said(run("data", "info", made))
    data = IndexedDataset(made)
    empty = sum(not len(data.document(at)) for at in range(41))
    for fact in ("documents 41", f"empty documents {empty}", f"tokens {data.num_tokens}", "dtype uint16", "vocabulary 600"):
        assert fact in words
    assert "a.jsonl" in words


def test_verify_finds_what_opening_does_not(made: Path) -> None:
    assert "checksums, counts and vocabulary as in the manifest" in said(run("data", "verify", made))
    file = made.with_suffix(".bin")
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    refused(run("data", "verify", made), "altered", str(file))
    manifest = json.loads(made.with_name("out.manifest.json").read_text())
    manifest["files"][".bin"]["sha256"] = __import__("hashlib").sha256(content).hexdigest()
    manifest["settings"]["vocab_size"] = 100
    made.with_name("out.manifest.json").write_text(json.dumps(manifest))
    refused(run("data", "verify", made), "not in the vocabulary", "< 100")
    made.with_name("out.manifest.json").write_text("{")
    refused(run("data", "verify", made), "cannot read the manifest")
    file.write_bytes(content[:-2])
    refused(run("data", "verify", made), "do not fit its index")


def test_split_and_merge_come_back_to_the_same_files(made: Path) -> None:
    counts = said(run("data", "split", made, "train=0.8", "valid=0.15", "test=0.05"))
    assert counts == f"{made}_train: 33 documents {made}_valid: 6 documents {made}_test: 2 documents"
    parts = [f"{made}_{part}" for part in ("train", "valid", "test")]
    merged = made.with_name("merged")
    assert said(run("data", "merge", *parts, "--output", merged)).startswith(f"{merged}: 41 documents")
    for end in (".bin", ".idx"):
        assert merged.with_suffix(end).read_bytes() == made.with_suffix(end).read_bytes()
    for name in (*parts, merged):
        assert "as in the manifest" in said(run("data", "verify", name))
    assert "vocabulary 600" in said(run("data", "info", merged))
    assert "out_valid" in said(run("data", "info", merged))
    refused(run("data", "merge", *parts, "--output", merged), "of that name", "--overwrite")
    refused(run("data", "split", made, "train=1.0"), "of that name")
    said(run("data", "merge", *parts[::-1], "--output", merged, "--overwrite"))
    assert merged.with_suffix(".bin").read_bytes() != made.with_suffix(".bin").read_bytes()


@pytest.mark.parametrize("parts", [["a=0.5"], ["a=0.5", "b=0.6"], ["a=1.5", "b=-0.5"], ["a"], ["a=x"]], ids=str)
def test_shares_that_do_not_add_up_are_refused(made: Path, parts: list[str]) -> None:
    refused(run("data", "split", made, *parts), "share")
    assert not list(made.parent.glob("out_*"))


def test_data_sets_of_different_tokenizers_are_not_merged(made: Path, tmp_path: Path) -> None:
    byte_level_bpe(500).save(str(tmp_path / "other.json"))
    (tmp_path / "b.txt").write_text("x\n")
    said(run("preprocess", tmp_path / "b.txt", "--tokenizer", tmp_path / "other.json", "--output", tmp_path / "b"))
    refused(run("data", "merge", made, tmp_path / "b", "--output", tmp_path / "c"), "different tokenizers")
    assert not (tmp_path / "c.idx").exists()


def test_peek_shows_tokens_and_text(made: Path, tokenizer: Path) -> None:
    ids = expected_ids(byte_level_bpe(), DOCUMENTS)
    assert f"40: {len(ids[40])} tokens: {' '.join(map(str, ids[40]))}" in said(run("data", "peek", made, "--document", -1))
    words = said(run("data", "peek", made, "--document", 40, "--tokenizer", tokenizer))
    assert words.endswith("'a last one<|endoftext|>'")
    assert said(run("data", "peek", made, "--document", 40, "--tokens", 1)).endswith(f"{ids[40][0]} ...")
    refused(run("data", "peek", made, "--document", 41), "no such document")
    other = byte_level_bpe()
    other.add_tokens(["another"])
    other.save(str(made.with_name("other.json")))
    assert "warning: made with another tokenizer" in said(
        run("data", "peek", made, "--tokenizer", made.with_name("other.json"))
    )
    assert "warning" not in words


def test_files_without_a_manifest_are_checked_too(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "a", vocab_size=10) as builder:
        builder.add_document([1, 2, 3], [3])
    assert "1 documents, 3 tokens; no manifest" in said(run("data", "verify", tmp_path / "a"))
    assert "largest token 3" in said(run("data", "info", tmp_path / "a"))
    refused(run("data", "info", tmp_path / "b"), "cannot open the index")
