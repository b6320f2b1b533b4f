"""Writing a data set in Megatron's format from tokens, sequence by sequence."""

from __future__ import annotations

import contextlib
import os
import shutil
from array import array
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any

import numpy as np

from oslo_engine.data.format import as_tokens, bin_path, dtype_for, prefix_of, write_index
from oslo_engine.data.indexed import IndexedDataset
from oslo_engine.data.place import put_in_place, write_manifest
from oslo_engine.errors import DataError

_ENDS = (".bin", ".idx", ".manifest.json")


class IndexedDatasetBuilder:
    """Writes ``NAME.bin`` and ``NAME.idx``, byte for byte as Megatron-Core's builder does for the same tokens.

        with IndexedDatasetBuilder("corpus", vocab_size=50257) as builder:
            builder.add_document([1, 2, 3, 4], [3, 1])   # two sequences
            builder.add_document([], [])                 # an empty document

    The files appear under their names when the block ends, and not at all if it ends with an exception.

    Args:
        name: common name of the two files; files of that name are replaced at the end.
        vocab_size: decides the type of a token, as Megatron does: uint16 below 65500, else int32.
        dtype: the type itself, instead.

    Raises:
        DataError: a token does not fit the type.
    """

    def __init__(self, name: str | os.PathLike[str], vocab_size: int | None = None, dtype: Any = None) -> None:
        if (vocab_size is None) == (dtype is None):
            raise DataError("the type of a token is not clear", expected="one of vocab_size and dtype", where=str(name))
        self.prefix = prefix_of(name)
        self.dtype = dtype_for(vocab_size) if vocab_size is not None else np.dtype(dtype).newbyteorder("<")
        self._lengths, self._documents = array("i"), array("q", [0])
        self._staged = {end: self.prefix.with_name(f".{self.prefix.name}.{os.getpid()}{end}") for end in _ENDS}
        self._manifest: dict[str, Any] | None = None
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = open(self._staged[".bin"], "wb")  # noqa: SIM115 - open until finalize
        except OSError as error:
            raise DataError("cannot write a data set there", where=str(self.prefix), got=error.strerror) from None

    def add_item(self, tokens: Any) -> None:
        """Append a sequence to the document that is being written."""
        found = as_tokens(tokens, self.dtype)
        self._write(found)
        self._lengths.append(found.size)

    def end_document(self) -> None:
        self._documents.append(len(self._lengths))

    def add_document(self, tokens: Any, lengths: Sequence[int]) -> None:
        """Append a document: all its tokens, and the lengths of its sequences, which add up to them."""
        found = as_tokens(tokens, self.dtype)
        if sum(lengths) != found.size or any(length < 0 for length in lengths):
            raise DataError("the sequences of a document do not add up", expected=f"{found.size} tokens", got=list(lengths))
        self._write(found)
        self._lengths.extend(lengths)
        self.end_document()

    def add_index(self, name: str | os.PathLike[str]) -> None:
        """Append all documents of another data set, which must have the same type of tokens."""
        other = IndexedDataset(name)
        if other.index.dtype != self.dtype:
            raise DataError(
                "data sets with tokens of different types cannot be joined",
                where=str(other.prefix),
                expected=str(self.dtype),
                got=str(other.index.dtype),
            )
        first = len(self._lengths)
        self._lengths.frombytes(np.ascontiguousarray(other.index.lengths, np.int32).tobytes())
        self._documents.frombytes(np.ascontiguousarray(other.index.documents[1:] + first, np.int64).tobytes())
        with open(bin_path(other.prefix), "rb") as file, self._disk_errors():
            shutil.copyfileobj(file, self._file, 1 << 22)

    def note(self, manifest: dict[str, Any]) -> None:
        """What the manifest beside the files is to say; sizes and checksums are added. Without it there is none."""
        self._manifest = manifest

    def finalize(self) -> None:
        """See everything to the disk and give the files their names, the index last."""
        with self._disk_errors():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            lengths, documents = np.frombuffer(self._lengths, np.int32), np.frombuffer(self._documents, np.int64)
            write_index(self._staged[".idx"], self.dtype, lengths, documents)
            tokens, index, notes = (self._staged[end] for end in _ENDS)
            if self._manifest is not None:
                write_manifest(notes, self._manifest, {".bin": tokens, ".idx": index})
            put_in_place(self.prefix, tokens, index, None if self._manifest is None else notes)

    def abandon(self) -> None:
        """Remove what was written."""
        self._file.close()
        for path in self._staged.values():
            path.unlink(missing_ok=True)

    def _write(self, tokens: Any) -> None:
        with self._disk_errors():
            self._file.write(tokens.tobytes())

    @contextlib.contextmanager
    def _disk_errors(self) -> Any:
        try:
            yield
        except OSError as error:
            raise DataError("a data set could not be written", where=str(self.prefix), got=error.strerror) from None

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abandon()
