"""tiktoken in place of the tokenizer: only where it is shown to give the same ids, and left at the first difference."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from corpora import EOD, byte_level_bpe, expected_ids, texts
from oslo_engine import DatasetPreprocessor
from oslo_engine.data import fast_bpe
from oslo_engine.data.character_classes import ClassComparison, character_classes
from oslo_engine.data.fast_bpe import FastEncoder, fast_path_obstacle
from oslo_engine.data.patterns import BYTE_LEVEL, KNOWN_SPLITS
from oslo_engine.data.tokenizing import JsonEncoder, may_cut, pieces_of, tokenizer_data

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split_by(pattern: str) -> Tokenizer:
    tokenizer = byte_level_bpe()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    return tokenizer


def changed(**changes: Any) -> Tokenizer:
    """A tokenizer with other entries in its model."""
    content = json.loads(byte_level_bpe().to_str())
    content["model"] |= changes
    return Tokenizer.from_str(json.dumps(content))


def with_digits() -> Tokenizer:
    tokenizer = byte_level_bpe()
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def with_normalizer(normalizer: Any) -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.normalizer = normalizer
    return tokenizer


def ids_in_another_order() -> Tokenizer:
    content = json.loads(byte_level_bpe().to_str())
    vocabulary = content["model"]["vocab"]
    others = [name for name in vocabulary if name != EOD]
    content["model"]["vocab"] = {EOD: 0} | {name: 599 - at for at, name in enumerate(others)}
    return Tokenizer.from_str(json.dumps(content))


def with_words_added() -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.add_tokens(["token", "  "])
    return tokenizer


FITTING = {
    "byte level": byte_level_bpe,
    **{f"split {number}": lambda pattern=pattern: split_by(pattern) for number, pattern in enumerate(sorted(KNOWN_SPLITS))},
    "digits": with_digits,
    "normalized": lambda: with_normalizer(normalizers.NFC()),
    "merges ignored": lambda: changed(ignore_merges=True),
    "other order of ids": ids_in_another_order,
    "added words": with_words_added,
}
_ENCODERS: dict[str, tuple[FastEncoder, JsonEncoder]] = {}


def encoders(name: str) -> tuple[FastEncoder, JsonEncoder]:
    if name not in _ENCODERS:
        data = tokenizer_data(FITTING[name]())
        assert fast_path_obstacle(data) is None
        general = JsonEncoder(data)
        _ENCODERS[name] = FastEncoder(data, general), general
    return _ENCODERS[name]


@pytest.mark.parametrize("name", FITTING)
def test_ids_are_those_of_the_tokenizer(name: str) -> None:
    fast, general = encoders(name)
    documents = texts(300, seed=3)
    used = sum(fast._is_plain(text) for text in documents)
    assert used >= (0 if name == "added words" else 200)
    for ours, theirs in zip(fast.encode(documents), general.encode(documents), strict=True):
        assert np.array_equal(ours, theirs)


@settings(max_examples=100, deadline=None)
@given(text=st.text(), name=st.sampled_from(sorted(FITTING)))
def test_ids_of_any_text_are_those_of_the_tokenizer(text: str, name: str) -> None:
    fast, general = encoders(name)
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates do not come this far
        return
    assert np.array_equal(fast.encode([text])[0], general.encode([text])[0])


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.sampled_from(["a", "word", " b", " c's", "  ", "\n", "9", "!", "é", " 你", "'ll", "x y z"]), max_size=60),
    name=st.sampled_from(sorted(set(FITTING) - {"normalized", "added words"})),
    size=st.integers(2, 30),
)
def test_a_text_cut_into_pieces_has_the_ids_of_the_whole(words: list[str], name: str, size: int) -> None:
    _, general = encoders(name)
    assert general.may_cut
    text = "".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oslo_engine.data.tokenizing._PIECE", size)
        pieces = list(pieces_of([text[at : at + 7] for at in range(0, len(text), 7)]))
    assert "".join(pieces) == text
    found = [token for piece in pieces for token in general.encode([piece])[0].tolist()]
    assert found == general.encode([text])[0].tolist()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (byte_level_bpe, True),
        (lambda: split_by(CL100K), True),
        (lambda: split_by(r"\s+|\S+"), False),
        (lambda: byte_level_bpe(add_prefix_space=True), False),
        (lambda: with_normalizer(normalizers.NFC()), False),
        (with_words_added, False),
    ],
)
def test_only_texts_of_known_tokenizers_are_cut(make: Any, expected: bool) -> None:
    assert may_cut(json.loads(make().to_str())) is expected


def test_a_text_without_a_place_to_cut_stays_whole() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oslo_engine.data.tokenizing._PIECE", 4)
        assert list(pieces_of(["x" * 50])) == ["x" * 50]
        assert list(pieces_of(["x" * 50 + " y"])) == ["x" * 50, " y"]


def without_a_byte() -> Tokenizer:
    content = json.loads(byte_level_bpe().to_str())
    content["model"]["merges"] = [merge for merge in content["model"]["merges"] if not any("!" in part for part in merge)]
    content["model"]["vocab"] = {name: at for name, at in content["model"]["vocab"].items() if "!" not in name}
    return Tokenizer.from_str(json.dumps(content))


def with_a_token_that_merges_do_not_reach() -> Tokenizer:
    """ "abc" is made of a and bc, but ab is merged first."""
    content = json.loads(byte_level_bpe(257).to_str())
    vocabulary = content["model"]["vocab"]
    for name in ("ab", "bc", "abc"):
        vocabulary[name] = len(vocabulary)
    content["model"]["merges"] = [["a", "b"], ["b", "c"], ["a", "bc"]]
    return Tokenizer.from_str(json.dumps(content))


def with_a_token_of_no_merge() -> Tokenizer:
    content = json.loads(byte_level_bpe().to_str())
    content["model"]["vocab"]["zqzq"] = len(content["model"]["vocab"])
    content["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(content))


OBSTACLES = {
    "not BPE": (lambda: Tokenizer(models.WordLevel({"?": 0}, unk_token="?")), "not BPE"),
    "space in front": (lambda: byte_level_bpe(add_prefix_space=True), "does not split words"),
    "no words": (lambda: byte_level_bpe(use_regex=False), "does not split words"),
    "unclear classes": (lambda: split_by(r"\w+|\W+"), "does not split words"),
    "removed": (lambda: split_by_removing(), "does not split words"),
    "lower case": (lambda: with_normalizer(normalizers.Lowercase()), "changes the text"),
    "dropout": (lambda: changed(dropout=0.1), "at random"),
    "suffix": (lambda: changed(end_of_word_suffix="</w>"), "marks pieces"),
    "byte missing": (without_a_byte, "lacks the byte 33"),
    "out of reach": (with_a_token_that_merges_do_not_reach, "'abc'"),
    "no merge": (with_a_token_of_no_merge, "no merge makes"),
}


def split_by_removing() -> Tokenizer:
    tokenizer = byte_level_bpe()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(BYTE_LEVEL), "removed"), byte_level])
    return tokenizer


@pytest.mark.parametrize(("make", "reason"), OBSTACLES.values(), ids=OBSTACLES)
def test_other_tokenizers_are_left_to_themselves(make: Any, reason: str, tmp_path: Path) -> None:
    tokenizer = make()
    assert reason in str(fast_path_obstacle(tokenizer_data(tokenizer)))
    data = DatasetPreprocessor(tokenizer, workers=0).preprocess(["a abc", "b"], tmp_path / "out")
    if "random" not in reason:
        assert [data.document(at).tolist() for at in (0, 1)] == expected_ids(tokenizer, ["a abc", "b"], eod=None)
    assert json.loads((tmp_path / "out.manifest.json").read_text())["fast_path"] is False


def test_tiktoken_would_be_wrong_where_merges_do_not_reach_a_token() -> None:
    """So that the check above is worth its time."""
    data = tokenizer_data(with_a_token_that_merges_do_not_reach())
    general = JsonEncoder(data)
    ids = FastEncoder(data, general)._encode("abc")
    assert ids is not None
    assert ids.tolist() != general.encode(["abc"])[0].tolist()


def test_one_difference_in_a_sample_starts_all_over_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_level_bpe()
    encode = FastEncoder._encode

    def wrong(encoder: FastEncoder, text: str) -> Any:
        found = encode(encoder, text)
        return found[::-1] if found is not None and "naïve" in text else found

    monkeypatch.setattr(FastEncoder, "_encode", wrong)
    monkeypatch.setattr(fast_bpe, "_SAMPLE_EVERY", 2000)
    documents = [*["a b c"] * 300, *["naïve words"] * 300]
    with caplog.at_level(logging.WARNING, "oslo_engine"):
        made = DatasetPreprocessor(tokenizer, workers=0, chunk_size=500)
        data = made.preprocess(documents, tmp_path / "out")
    assert [data.document(at).tolist() for at in range(600)] == expected_ids(tokenizer, documents, eod=None)
    assert "done anew" in caplog.text
    assert json.loads((tmp_path / "out.manifest.json").read_text())["fast_path"] is False
    with pytest.raises(ValueError, match="a second time"):
        made.preprocess(iter(documents), tmp_path / "other")


def test_a_character_that_the_engines_see_differently_is_left_to_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = ClassComparison.alike
    monkeypatch.setattr(ClassComparison, "alike", lambda comparison, found: alike(comparison, found) - {"你", "!"})
    data = tokenizer_data(byte_level_bpe())
    encoder = FastEncoder(data, JsonEncoder(data))
    encoder.encode(["你好", "好"])
    assert [encoder._is_plain(text) for text in ("你好", "好", "a!", "a")] == [False, True, False, True]


def test_differences_between_the_engines_are_seen() -> None:
    comparison = ClassComparison(BYTE_LEVEL)
    assert comparison.alike("aé1 你²\u00a0\u3000!") == set("aé1 你²\u00a0\u3000!")
    letters = comparison._expressions.index(r"\p{L}{2}|[\s\S]")
    comparison._theirs[letters] = pre_tokenizers.Split(Regex(r"[a-zé]{2}|[\s\S]"), "isolated")
    assert comparison.alike("aé1 你²\u00a0\u3000!") == set("aé1 ²\u00a0\u3000!")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (BYTE_LEVEL, [r"\p{L}", r"\p{N}", r"\s"]),
        (CL100K, ["(?i:[a-z])", r"\p{L}", r"\p{N}", r"\s"]),
        (r"\P{L}+|\S", [r"\p{L}", r"\s"]),
        (r"\w+", None),
        (r"\bword", None),
        (r"[[:alpha:]]+", None),
        (r"[\p{L}&&a]", None),
    ],
)
def test_classes_of_an_expression_are_found(pattern: str, expected: list[str] | None) -> None:
    assert character_classes(pattern) == expected


def test_a_text_that_is_too_much_for_tiktoken_is_left_to_the_tokenizer() -> None:
    fast, general = encoders("byte level")
    text = " " * 300_000 + "a"
    assert np.array_equal(fast.encode([text])[0], general.encode([text])[0])
