"""Byte-level BPE by tiktoken, several times as fast as by the ``tokenizers`` library, with the same ids.

It is used where three things are shown:

* **Merging.** Every token that merging can make at all comes out of its own bytes by the tokenizer's merges (checked for each
  token). Then tiktoken, which joins two tokens whenever the result is one, joins where the tokenizer does: within the bytes of
  such a token both go through the same states, since nothing else can have touched them.
* **Words.** Both split the text by the same expression, but in two engines. Every character is put to both when it is first
  met: they must agree in which of the expression's classes (letters, numbers, spaces, ...) it is.
* **Samples.** Now and then a document is encoded both ways. One difference, and the whole run starts over without tiktoken.

Texts in which an added token occurs, and those that a normalizer would change, are left to the tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oslo_engine.data.character_classes import ClassComparison, character_classes
from oslo_engine.data.patterns import DIGITS_BYTE_LEVEL, word_pattern
from oslo_engine.data.tokenizing import Encoder, TokenizerData, may_cut

_SAMPLE_EVERY = 1 << 21  # characters
_SAMPLE = 1 << 14  # characters, at most


class FastPathDiffersError(Exception):
    """A sample came out differently: what was encoded so far must not be used."""


def fast_path_obstacle(data: TokenizerData) -> str | None:
    """Why tiktoken cannot stand in for a tokenizer; None if it can. Takes a second for a large vocabulary."""
    try:
        import tiktoken
    except ImportError:
        return "tiktoken is not installed (pip install 'oslo-engine[data]')"
    del tiktoken
    if not data.is_json:
        return "it is not of the tokenizers library"
    tokenizer = json.loads(data.content)
    return _model_obstacle(tokenizer) or _merges_obstacle(data, tokenizer)


def _model_obstacle(tokenizer: dict[str, Any]) -> str | None:
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        return "it is not BPE"
    pattern = word_pattern(tokenizer.get("pre_tokenizer"))
    if pattern is None or character_classes(pattern) is None:
        return "it does not split words by one known expression before bytes are merged"
    if (tokenizer.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        return "it changes the text before it is split"
    if any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")):
        return "it marks pieces of words, or drops merges at random"
    missing = [byte for byte, character in enumerate(_ALPHABET) if character not in model["vocab"]]
    return f"its vocabulary lacks the byte {missing[0]}" if missing else None


def _merges_obstacle(data: TokenizerData, tokenizer: dict[str, Any]) -> str | None:
    from tokenizers import Tokenizer

    model = tokenizer["model"]
    made = set(_merge_products(model))
    others = model["vocab"].keys() - made - set(_ALPHABET) - {token["content"] for token in tokenizer["added_tokens"]}
    if model.get("ignore_merges") and others:
        return "it has tokens that no merge makes"
    bare = {"added_tokens": [], "pre_tokenizer": None, "normalizer": None, "model": model | {"ignore_merges": False}}
    plain = Tokenizer.from_str(json.dumps(tokenizer | bare))
    names = list(made)
    for name, encoding in zip(names, plain.encode_batch_fast(names, add_special_tokens=False), strict=True):
        if encoding.ids != [model["vocab"][name]]:
            return f"its merges do not make the token {name!r} of its own bytes"
    return None


def _merge_products(model: dict[str, Any]) -> list[str]:
    """The token that each merge makes, in the order of merges."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return list(dict.fromkeys(left + right for left, right in pairs))


def _alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_ALPHABET = _alphabet()
_BYTE_OF = {character: byte for byte, character in enumerate(_ALPHABET)}


class FastEncoder:
    """Encodes by tiktoken what it can be trusted with, and the rest by the tokenizer itself.

    Raises:
        FastPathDiffersError: from ``encode``.
    """

    def __init__(self, data: TokenizerData, general: Encoder) -> None:
        import tiktoken
        from tokenizers import Tokenizer

        tokenizer = json.loads(data.content)
        model, pattern = tokenizer["model"], word_pattern(tokenizer["pre_tokenizer"])
        assert pattern is not None
        names = [*_ALPHABET, *_merge_products(model)]
        ranks = {bytes(_BYTE_OF[character] for character in name): rank for rank, name in enumerate(names)}
        self._general, self.may_cut = general, may_cut(tokenizer)
        # A special token is what makes it fast: without any, the (empty) expression for them is tried at every character.
        # It is never allowed, so a text that has it is text.
        never = {"\0never\0": len(ranks)}
        self._fast = tiktoken.Encoding("merges", pat_str=pattern, mergeable_ranks=ranks, special_tokens=never)
        self._ids = np.array([model["vocab"][name] for name in names], np.uint32)
        self._added = [token["content"] for token in tokenizer["added_tokens"]]
        self._starts = sorted({text[:2] for text in self._added})
        self._normalizer = Tokenizer.from_str(data.content.decode()).normalizer
        self._classes = ClassComparison(pattern, digits=pattern == DIGITS_BYTE_LEVEL)
        ascii_characters = {chr(code) for code in range(128)}
        self._alike = self._classes.alike(ascii_characters)
        self._unlike = ascii_characters - self._alike
        self._until_sample = 0

    def encode(self, texts: list[str]) -> list[NDArray[Any]]:
        self._learn(texts)
        found: list[NDArray[Any] | None] = [self._encode(text) if self._is_plain(text) else None for text in texts]
        self._compare(texts, found)
        left = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        others = iter(self._general.encode(left) if left else ())
        return [next(others) if ids is None else ids for ids in found]

    def _learn(self, texts: list[str]) -> None:
        met = set[str]().union(*(text for text in texts if not text.isascii()))
        new = met - self._alike - self._unlike
        if new:
            alike = self._classes.alike(new)
            self._alike |= alike
            self._unlike |= new - alike

    def _encode(self, text: str) -> NDArray[Any] | None:
        try:
            ranks = self._fast.encode_to_numpy(text, disallowed_special=())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            return None  # the expression was too much for its engine, which panics
        return self._ids[ranks]

    def _is_plain(self, text: str) -> bool:
        if any(start in text for start in self._starts) and any(token in text for token in self._added):
            return False
        if self._normalizer is not None and not text.isascii() and self._normalizer.normalize_str(text) != text:
            return False
        return not any(character in text for character in self._unlike)

    def _compare(self, texts: list[str], found: list[NDArray[Any] | None]) -> None:
        for text, ids in zip(texts, found, strict=True):
            self._until_sample -= len(text)
            if self._until_sample < 0 and ids is not None:
                self._until_sample = _SAMPLE_EVERY
                sample = text[:_SAMPLE]
                ours = ids if len(sample) == len(text) else self._encode(sample)
                if ours is not None and not np.array_equal(ours, self._general.encode([sample])[0]):
                    raise FastPathDiffersError(sample[:100])
