"""The pieces into which sources are divided for the workers, and what they give back.

How sources are divided depends on ``chunk_size`` alone, and results are put together in order: the number of workers shows
nowhere in the files.
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Document: TypeAlias = str | list[str]  # a text, or the texts of a document's sequences


@dataclass(frozen=True)
class TextRange:
    """The lines of a plain file that begin at byte ``start`` or later, before ``stop``."""

    path: str
    start: int
    stop: int
    json_key: str | None  # None: each line is a document

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of a compressed file."""

    path: str
    first_line: int
    content: bytes
    json_key: str | None
    num_bytes: int  # read of the source for it


@dataclass(frozen=True)
class DocumentBlock:
    """Documents that the parent has read: rows of a table, items of an iterable."""

    where: str
    first: int
    documents: list[Any]
    num_bytes: int


Unit: TypeAlias = TextRange | LineBlock | DocumentBlock


@dataclass(frozen=True)
class Problem:
    """What is wrong with a record, and where: a line (from 1), a byte of the file, or an item (from 0)."""

    path: str
    place: str
    position: int
    complaint: str


@dataclass
class Result:
    """A part of what a unit became, in order; the last part of a unit is ``last``.

    Attributes:
        tokens: the bytes of the ``.bin`` file.
        lengths: of the sequences that end in this part, in tokens.
        counts: sequences of the documents that end in this part.
        text_bytes: of the documents, in UTF-8.
    """

    tokens: bytes = b""
    lengths: bytes = b""
    counts: bytes = b""
    text_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    last: bool = False


def chained_digest(before: str, unit: Unit) -> str:
    """Identifies the units so far, for sources that can change without a trace in a file system."""
    content = unit if isinstance(unit, TextRange) else unit.content if isinstance(unit, LineBlock) else unit.documents
    chunk = content if isinstance(content, bytes) else pickle.dumps(content, protocol=5)
    return hashlib.blake2b(before.encode() + chunk, digest_size=16).hexdigest()
