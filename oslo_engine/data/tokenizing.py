"""A tokenizer as plain data that any process can use, and the ways to encode with it.

One of the ``tokenizers`` library is its JSON, so that workers need neither transformers nor torch; another one is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oslo_engine.data.patterns import cuttable_pattern
from oslo_engine.errors import DataError

_PROBES = ("Hello world", " two  spaces\n\tand a tab", "naïve café 你好 😀", "1234 don't we'll", "<s>[INST]</s>", "UPPER_lower")
_PIECE = 1 << 18  # characters of a long text that are encoded at once
_CUT = re.compile("[A-Za-z](?= [A-Za-z])")


@dataclass(frozen=True)
class TokenizerData:
    """A tokenizer to be sent to workers.

    Attributes:
        content: JSON of the ``tokenizers`` library, or a pickled tokenizer.
        is_json: which of the two.
        vocab_size: number of ids, added tokens included.
        eos_token_id: what the tokenizer itself says ends a text.
        name: for people.
    """

    content: bytes
    is_json: bool
    vocab_size: int
    eos_token_id: int | None
    name: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def tokenizer_data(tokenizer: Any) -> TokenizerData:
    """Of a Transformers tokenizer, fast or slow, or one of the ``tokenizers`` library.

    Raises:
        DataError: it is none of these.
    """
    if isinstance(tokenizer, TokenizerData):
        return tokenizer
    from tokenizers import Tokenizer

    if isinstance(tokenizer, Tokenizer):
        return TokenizerData(tokenizer.to_str().encode(), True, _num_ids(tokenizer.get_vocab()), None, "tokenizers.Tokenizer")
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "get_vocab")):
        raise DataError(
            "this is no tokenizer", expected="one of Transformers or of the tokenizers library", got=type(tokenizer).__name__
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_json = isinstance(backend, Tokenizer) and _same(tokenizer, backend)
    try:
        content = backend.to_str().encode() if is_json else pickle.dumps(tokenizer)  # type: ignore[union-attr]
    except Exception as error:
        raise DataError("a tokenizer cannot be sent to the workers", where=type(tokenizer).__name__, got=error) from None
    eos = getattr(tokenizer, "eos_token_id", None)
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return TokenizerData(content, is_json, max(_num_ids(tokenizer.get_vocab()), len(tokenizer)), eos, name)


def load_tokenizer(name: str) -> TokenizerData:
    """By the path of a ``tokenizer.json``, or a folder or hub name, which a process of its own loads: it needs more memory."""
    if name.endswith(".json"):
        from tokenizers import Tokenizer

        try:
            return tokenizer_data(Tokenizer.from_file(name))
        except Exception as error:
            raise DataError("cannot read a tokenizer", where=name, got=error) from None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer"
        code = (
            f"import sys, pickle; sys.path[:0] = {sys.path!r}\n"
            "from transformers import AutoTokenizer\n"
            "from oslo_engine.data.tokenizing import tokenizer_data\n"
            "found = tokenizer_data(AutoTokenizer.from_pretrained(sys.argv[1]))\n"
            "open(sys.argv[2], 'wb').write(pickle.dumps(found))"
        )
        ran = subprocess.run([sys.executable, "-c", code, name, str(path)], capture_output=True, text=True, check=False)
        if ran.returncode:
            complaint = (ran.stderr.strip().splitlines() or ["no message"])[-1]
            raise DataError(
                "cannot load a tokenizer",
                where=name,
                expected="a tokenizer.json, a folder with a tokenizer, or a name on the hub",
                got=complaint,
            )
        loaded: TokenizerData = pickle.loads(path.read_bytes())
        return loaded


def _num_ids(vocabulary: dict[str, int]) -> int:
    return max(len(vocabulary), max(vocabulary.values(), default=-1) + 1)


def _same(tokenizer: Any, backend: Any) -> bool:
    """Whether a tokenizer adds nothing of its own to the one inside it."""
    theirs = [tokenizer.encode(text, add_special_tokens=False) for text in _PROBES]
    return theirs == [backend.encode(text, add_special_tokens=False).ids for text in _PROBES]


class Encoder(Protocol):
    may_cut: bool  # whether a long text can be encoded in pieces

    def encode(self, texts: list[str]) -> list[NDArray[Any]]:
        """The ids of each text, of an integer type."""
        ...


class JsonEncoder:
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(self, data: TokenizerData) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(data.content.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.may_cut = may_cut(json.loads(data.content))

    def encode(self, texts: list[str]) -> list[NDArray[Any]]:
        with _failures_named():
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


class PickledEncoder:
    """Any other tokenizer, by its ``encode``."""

    may_cut = False

    def __init__(self, data: TokenizerData) -> None:
        self._tokenizer = pickle.loads(data.content)

    def encode(self, texts: list[str]) -> list[NDArray[Any]]:
        with _failures_named():
            return [np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int64) for text in texts]


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DataError("the tokenizer failed on a text", got=f"{type(error).__name__}: {error}") from None


def general_encoder(data: TokenizerData) -> Encoder:
    return JsonEncoder(data) if data.is_json else PickledEncoder(data)


def may_cut(tokenizer: dict[str, Any]) -> bool:
    """Whether a text may be cut between a letter and a space before a letter, and the ids stay the same.

    So it is where words are split off by one of the known patterns, all of which end a word there, whatever lies on either
    side; where nothing changes the text before; and where no added token can reach across.
    """
    added = [token["content"] for token in tokenizer.get("added_tokens") or ()]
    reaching = any(not text or text[0].isalpha() or text[-1].isalpha() or re.search(r"\s", text) for text in added)
    return not reaching and tokenizer.get("normalizer") is None and cuttable_pattern(tokenizer.get("pre_tokenizer"))


def pieces_of(parts: Iterable[str]) -> Iterator[str]:
    """A long text in pieces that can be encoded one by one."""
    held = ""
    for part in parts:
        held += part
        while len(held) > _PIECE:
            cuts = [found.end() for found in _CUT.finditer(held, _PIECE // 2, _PIECE + 2)]
            cut = cuts[-1] if cuts else next((found.end() for found in _CUT.finditer(held, _PIECE)), 0)
            if not cut:
                break
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def is_long(text: str) -> bool:
    return len(text) > _PIECE
