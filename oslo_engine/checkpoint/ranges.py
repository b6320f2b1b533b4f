"""Reading parts of arrays that lie in a file row by row: their bytes, and as far as possible only these, into given memory.

A part is a list of pieces along one dimension: ``(start, stop, at)`` are the entries from ``start`` to ``stop``, which become
those of the result from ``at`` on.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oslo_engine.errors import CheckpointError
from oslo_engine.shards import Span

DIRECT_RUN_BYTES = 1 << 16  # column cuts whose runs are at least this long are read run by run, shorter ones by whole rows
CHUNK_BYTES = 1 << 22  # how many bytes of whole rows are held at once
IO_BYTES = 1 << 30  # the kernel moves at most 2 GiB in one call

Piece = tuple[int, int, int]


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredArray:
    """An array in a file: all its entries in row-major order from byte ``start`` on."""

    spec: TensorSpec
    start: int


class ReadOnlyFile:
    """A file that is read by position. Independent of later changes to the directory.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError("cannot open a file of the checkpoint", where=str(path), got=error.strerror) from None
        weakref.finalize(self, os.close, self.descriptor)
        self.size = os.fstat(self.descriptor).st_size

    def read_bytes(self, start: int, length: int) -> bytes:
        return os.pread(self.descriptor, length, start)

    def read_into(self, array: StoredArray, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
        """Read pieces of an array.

        Args:
            out: contiguous, on the CPU, with the type and the shape of the array except along ``dim``.
        """
        shape = array.spec.shape or (1,)
        item_bytes = math.prod(shape[dim + 1 :]) * array.spec.dtype.itemsize
        columns = [(start * item_bytes, stop * item_bytes, at * item_bytes) for start, stop, at in pieces if stop > start]
        count, row_bytes = math.prod(shape[:dim]), shape[dim] * item_bytes
        if columns and count and item_bytes:
            rows = out.reshape(-1).view(torch.uint8).view(count, -1)
            if count == 1 or min(stop - start for start, stop, _ in columns) >= DIRECT_RUN_BYTES:
                self._read_runs(array.start, row_bytes, columns, rows)
            else:
                self._read_rows(array.start, row_bytes, columns, rows)

    def _read_runs(self, start: int, row_bytes: int, columns: Sequence[Piece], out: Tensor) -> None:
        view = memory(out.view(-1))
        for row in range(out.shape[0]):
            for first, last, at in columns:
                to = row * out.shape[1] + at
                self._fill(view[to : to + last - first], start + row * row_bytes + first)

    def _read_rows(self, start: int, row_bytes: int, columns: Sequence[Piece], out: Tensor) -> None:
        per_chunk = max(1, CHUNK_BYTES // row_bytes)
        chunk = torch.empty(min(per_chunk, out.shape[0]), row_bytes, dtype=torch.uint8)
        for top in range(0, out.shape[0], per_chunk):
            num = min(per_chunk, out.shape[0] - top)
            self._fill(memory(chunk[:num].view(-1)), start + top * row_bytes)
            for first, last, at in columns:
                out[top : top + num, at : at + last - first] = chunk[:num, first:last]

    def _fill(self, view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            got = os.preadv(self.descriptor, [view[done : done + IO_BYTES]], start + done)
            if got == 0:
                raise CheckpointError(
                    "the file was truncated while it was read",
                    where=str(self.path),
                    expected=f"{len(view)} bytes at {start}",
                    got=f"{done} bytes",
                    hint="copy or download the file again",
                )
            done += got


def memory(flat: Tensor) -> memoryview:
    """The bytes of a tensor of one dimension and of type uint8."""
    return memoryview(flat.numpy().data)


def consecutive(spans: Sequence[Span]) -> tuple[list[Piece], int]:
    """The pieces that put spans one after another, and how many entries that are."""
    pieces, at = [], 0
    for start, stop in spans:
        pieces.append((start, stop, at))
        at += stop - start
    return pieces, at


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :]) if shape else ()
