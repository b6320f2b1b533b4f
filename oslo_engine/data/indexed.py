"""A data set in Megatron's format, opened: sequences, documents, and any range of its tokens."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oslo_engine.data.format import Index, bin_path, idx_path, prefix_of, read_index
from oslo_engine.data.readers import READERS, TokenReader, check_implementation
from oslo_engine.errors import DataError


class IndexedDataset:
    """The files ``NAME.bin`` and ``NAME.idx``, ours or Megatron's. Item i is sequence i: its tokens, not to be written to.

    Args:
        name: common name of the two files.
        binarization_impl: ``mmap``, ``lazy`` or ``cached``, see ``oslo_engine.data.readers``.

    Raises:
        DataError: a file is missing, cut short or altered.
    """

    def __init__(self, name: str | os.PathLike[str], binarization_impl: str = "mmap") -> None:
        self.prefix = prefix_of(name)
        self.binarization_impl = check_implementation(binarization_impl)
        self._open()

    def _open(self) -> None:
        self.index: Index = read_index(idx_path(self.prefix))
        path = bin_path(self.prefix)
        expected = self.index.num_tokens * self.index.dtype.itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError("cannot open the tokens of a data set", where=str(path), got=error.strerror) from None
        if size != expected:
            raise DataError(
                "the tokens of a data set do not fit its index",
                where=str(path),
                expected=f"{expected} bytes",
                got=f"{size} bytes",
                hint="one of the two files was cut short or belongs to another data set: prepare it again",
            )
        self._tokens: TokenReader = READERS[self.binarization_impl](path, self.index.dtype, self.index.num_tokens)
        self._bounds: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.index.lengths)

    def __getitem__(self, position: int) -> NDArray[Any]:
        if not -len(self) <= position < len(self):
            raise IndexError(f"sequence {position} of a data set of {len(self)}")
        start = int(self.index.offsets[position]) // self.index.dtype.itemsize
        return self._tokens.read(start, start + int(self.index.lengths[position]))

    @property
    def num_documents(self) -> int:
        return len(self.index.documents) - 1

    @property
    def num_tokens(self) -> int:
        return self.index.num_tokens

    @property
    def document_bounds(self) -> NDArray[np.int64]:
        """Where each document begins and, at the end, where the last one stops, in tokens; i64[documents + 1]."""
        if self._bounds is None:
            self._bounds = self.index.document_bounds()
        return self._bounds

    def document(self, position: int) -> NDArray[Any]:
        """All tokens of a document."""
        if not -self.num_documents <= position < self.num_documents:
            raise IndexError(f"document {position} of a data set of {self.num_documents}")
        position %= self.num_documents
        return self._tokens.read(int(self.document_bounds[position]), int(self.document_bounds[position + 1]))

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens ``start`` to ``stop`` of all documents, one after another."""
        return self._tokens.read(start, stop)

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "binarization_impl": self.binarization_impl}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
