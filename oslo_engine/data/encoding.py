"""From a unit to tokens: documents are encoded in batches, long texts in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oslo_engine.data.documents import LongText, Texts, documents_of
from oslo_engine.data.fast_bpe import FastEncoder
from oslo_engine.data.format import as_tokens
from oslo_engine.data.tokenizing import Encoder, TokenizerData, general_encoder, is_long, pieces_of
from oslo_engine.data.units import Problem, Result, Unit

_BATCH = 1 << 18  # characters that are encoded at once
_PART = 1 << 20  # bytes of tokens after which a part of the result is handed on


@dataclass(frozen=True)
class EncodingPlan:
    """All that a worker must know.

    Attributes:
        eod: the id after each document that is not empty; None for none.
        fast: encode with tiktoken, checked against the tokenizer on samples.
    """

    tokenizer: TokenizerData
    dtype: str
    eod: int | None
    fast: bool


class UnitEncoder:
    """Encodes units, one after another."""

    def __init__(self, plan: EncodingPlan) -> None:
        self._eod, self._dtype = plan.eod, np.dtype(plan.dtype)
        general = general_encoder(plan.tokenizer)
        self._encoder: Encoder = FastEncoder(plan.tokenizer, general) if plan.fast else general

    def encode(self, unit: Unit) -> Iterator[Result]:
        """The results of a unit, in order; the last one is marked.

        Raises:
            DataError: a token does not fit the type.
            FastPathDiffersError: a sample came out differently.
        """
        part, waiting, size = _Part(self._dtype, self._eod), list[list[str]](), 0
        for found in documents_of(unit, self._encoder.may_cut):
            if isinstance(found, Problem):
                part.problems.append(found)
                continue
            texts = self._whole(found)
            if texts is not None:
                waiting.append(texts)
                size += sum(map(len, texts))
            if texts is None or size >= _BATCH:
                self._flush(part, waiting)
                waiting, size = [], 0
            if texts is None:
                yield from self._in_pieces(part, found)
            if part.num_bytes >= _PART:
                yield part.take()
        self._flush(part, waiting)
        yield part.take(last=True)

    def _whole(self, texts: Texts) -> list[str] | None:
        """The texts, if none of them must be encoded in pieces."""
        whole = [text for text in texts if isinstance(text, str) and not (self._encoder.may_cut and is_long(text))]
        return whole if len(whole) == len(texts) else None

    def _in_pieces(self, part: _Part, texts: Texts) -> Iterator[Result]:
        for text in texts:
            for piece in pieces_of(text.parts() if isinstance(text, LongText) else (text,)):
                part.add_piece(self._encoder.encode([piece])[0], len(piece.encode()))
                if part.num_bytes >= _PART:
                    yield part.take()
            part.end_sequence()
        part.end_document()

    def _flush(self, part: _Part, documents: list[list[str]]) -> None:
        texts = [text for document in documents for text in document]
        encoded = iter(self._encoder.encode(texts) if texts else ())
        for document in documents:
            for text in document:
                part.add_piece(next(encoded), len(text) if text.isascii() else len(text.encode()))
                part.end_sequence()
            part.end_document()


class _Part:
    """A result that grows."""

    def __init__(self, dtype: np.dtype[Any], eod: int | None) -> None:
        self._dtype = dtype
        self._eod = None if eod is None else np.array([eod], dtype)
        self._sequence = 0  # tokens of the sequence that has not ended
        self._document: list[int] = []  # lengths of the sequences of the document that has not ended
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[NDArray[Any]] = []
        self._lengths: list[int] = []
        self._counts: list[int] = []
        self._text_bytes = 0
        self.num_bytes = 0
        self.problems: list[Problem] = []

    def add_piece(self, ids: NDArray[Any], text_bytes: int) -> None:
        tokens = as_tokens(ids, self._dtype)
        self._append(tokens)
        self._sequence += len(tokens)
        self._text_bytes += text_bytes

    def _append(self, tokens: NDArray[Any]) -> None:
        self._tokens.append(tokens)
        self.num_bytes += tokens.nbytes

    def end_sequence(self) -> None:
        if self._sequence:  # as Megatron does, a text without tokens is no sequence
            self._document.append(self._sequence)
        self._sequence = 0

    def end_document(self) -> None:
        if self._document and self._eod is not None:
            self._append(self._eod)
            self._document[-1] += 1
        self._lengths += self._document
        self._counts.append(len(self._document))
        self._document = []

    def take(self, last: bool = False) -> Result:
        result = Result(
            tokens=b"".join(tokens.tobytes() for tokens in self._tokens),
            lengths=np.array(self._lengths, "<i4").tobytes(),
            counts=np.array(self._counts, "<i4").tobytes(),
            text_bytes=self._text_bytes,
            problems=self.problems,
            last=last,
        )
        self._clear()
        return result
