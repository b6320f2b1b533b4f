"""Megatron's indexed format: ``NAME.bin`` holds the tokens of all sequences, ``NAME.idx`` says where each one lies.

    .idx, little-endian:
      0 b"MMIDIDX\\0\\0" | 9 u64 version = 1 | 17 u8 code of the token's type | 18 u64 S sequences | 26 u64 documents + 1
      34 i32 lengths[S], in tokens | i64 offsets[S], in bytes of .bin | i64 documents[documents + 1] | optional i8 modes[S]

Document d is the sequences ``documents[d]`` to ``documents[d + 1]``: an empty document has none.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from oslo_engine.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
SMALL_VOCABULARY = 65500  # below it Megatron's writer takes two bytes for a token
_BLOCK = 1 << 20  # entries of an index that are written or checked at once


@dataclass(frozen=True, eq=False)
class Index:
    """What an ``.idx`` file says.

    Attributes:
        dtype: of a token.
        lengths: tokens of each sequence, i32[S].
        offsets: where each begins in the ``.bin`` file, in bytes, i64[S].
        documents: the first sequence of each document and, at the end, S; i64[documents + 1].
        modes: a mark of each sequence in multimodal files, i8[S].
    """

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    documents: NDArray[np.int64]
    modes: NDArray[np.int8] | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if not len(self.lengths) else int(self.offsets[-1]) // self.dtype.itemsize + int(self.lengths[-1])

    def document_bounds(self) -> NDArray[np.int64]:
        """Where documents begin and, at the end, where the last one stops, in tokens; i64[documents + 1]."""
        begins = np.empty(len(self.lengths) + 1, np.int64)
        np.floor_divide(self.offsets, self.dtype.itemsize, out=begins[:-1])
        begins[-1] = self.num_tokens
        return begins[self.documents]


def prefix_of(name: str | os.PathLike[str]) -> Path:
    """The common name of the two files; a name that ends in ``.bin`` or ``.idx`` means the pair too."""
    path = Path(name)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def bin_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.idx")


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Megatron's choice of a token's type: uint16 for vocabularies below 65500, else int32."""
    return np.dtype("<u2") if vocab_size < SMALL_VOCABULARY else np.dtype("<i4")


def as_tokens(ids: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The ids as an array of that type.

    Raises:
        DataError: one of them does not fit: cut to two bytes, token 70000 would silently become 4464.
    """
    given = np.asarray(ids)
    if given.dtype == dtype or not given.size:
        return given.astype(dtype, copy=False)
    if given.dtype.kind not in "iu":
        raise DataError("tokens must be integers", expected=f"ids that fit {dtype}", got=str(given.dtype))
    limits = np.iinfo(dtype)
    low, high = int(given.min()), int(given.max())
    if low < limits.min or high > limits.max:
        raise DataError(
            "a token id does not fit the type of the file",
            expected=f"{limits.min} to {limits.max} ({dtype})",
            got=high if high > limits.max else low,
            hint="the type follows from the vocabulary's size: give that of the tokenizer, added tokens included",
        )
    return given.astype(dtype)


def write_index(
    path: Path,
    dtype: np.dtype[Any],
    lengths: NDArray[np.int32],
    documents: NDArray[np.int64],
    modes: NDArray[np.int8] | None = None,
) -> None:
    """Write an ``.idx`` file, a block at a time, and see it to the disk; the offsets follow from the lengths."""
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(lengths), len(documents)))
        _write_blocks(file, lengths, np.dtype("<i4"))
        for offsets in _offsets(lengths, dtype.itemsize):
            file.write(offsets.tobytes())
        _write_blocks(file, documents, np.dtype("<i8"))
        if modes is not None:
            _write_blocks(file, modes, np.dtype("i1"))
        file.flush()
        os.fsync(file.fileno())


def _write_blocks(file: IO[bytes], values: NDArray[Any], dtype: np.dtype[Any]) -> None:
    for start in range(0, len(values), _BLOCK):
        file.write(values[start : start + _BLOCK].astype(dtype, copy=False).tobytes())


def _offsets(lengths: NDArray[np.int32], itemsize: int) -> Iterator[NDArray[np.int64]]:
    position = 0
    for start in range(0, len(lengths), _BLOCK):
        ends = position + np.cumsum(lengths[start : start + _BLOCK], dtype=np.int64) * itemsize
        yield np.concatenate(([position], ends[:-1])).astype("<i8", copy=False)
        position = int(ends[-1])


def read_index(path: Path) -> Index:
    """Open an ``.idx`` file and check all that it says; its arrays stay in the file (mapped).

    Raises:
        DataError: it is missing, cut short, foreign, or contradicts itself.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
    except OSError as error:
        raise DataError("cannot open the index of a data set", where=str(path), got=error.strerror) from None
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise DataError("this is not an index of a data set", where=str(path), expected=f"a file that begins with {MAGIC!r}")
    _, version, code, num_sequences, num_bounds = HEADER.unpack(head)
    if version != VERSION or code not in DTYPES:
        raise DataError(
            "an index of a kind that is not known",
            where=str(path),
            expected=f"version {VERSION}, a type from 1 to 8",
            got=f"version {version}, type {code}",
        )
    plain = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if size not in (plain, plain + num_sequences):
        raise DataError(
            "an index has the wrong size",
            where=str(path),
            expected=f"{plain} bytes for {num_sequences} sequences and {num_bounds - 1} documents",
            got=f"{size} bytes",
            hint="it was cut short or altered: prepare the data set again",
        )
    return _checked(path, _mapped(path, DTYPES[code], num_sequences, num_bounds, size > plain))


def _mapped(path: Path, dtype: np.dtype[Any], num_sequences: int, num_bounds: int, has_modes: bool) -> Index:
    content: NDArray[np.uint8] = np.memmap(path, mode="r", dtype=np.uint8)
    ends = np.cumsum([HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_bounds]).tolist()
    return Index(
        dtype=dtype,
        lengths=content[ends[0] : ends[1]].view("<i4"),
        offsets=content[ends[1] : ends[2]].view("<i8"),
        documents=content[ends[2] : ends[3]].view("<i8"),
        modes=content[ends[3] :].view("i1") if has_modes else None,
    )


def _checked(path: Path, index: Index) -> Index:
    complaint = None
    documents = index.documents
    if not len(documents) or documents[0] != 0 or documents[-1] != len(index.lengths):
        complaint = "its documents do not cover its sequences"
    elif any(
        (documents[at + 1 : at + _BLOCK + 1] < documents[at : at + _BLOCK][: len(documents) - at - 1]).any()
        for at in range(0, len(documents), _BLOCK)
    ):
        complaint = "its documents are not in order"
    elif any((index.lengths[at : at + _BLOCK] < 0).any() for at in range(0, len(index.lengths), _BLOCK)):
        complaint = "a sequence has a negative length"
    else:
        expected = _offsets(index.lengths, index.dtype.itemsize)
        for at, offsets in zip(range(0, len(index.lengths), _BLOCK), expected, strict=True):
            if not np.array_equal(offsets, index.offsets[at : at + _BLOCK]):
                complaint = "its sequences do not follow one another"
    if complaint is not None:
        raise DataError(f"a damaged index: {complaint}", where=str(path), hint="it was altered: prepare the data set again")
    return index
