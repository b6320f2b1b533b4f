"""Reading and writing safetensors files by byte ranges.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes one after another. The header is
checked before any of it is used. Reading copies the wanted ranges, and only these, into buffers of its own: mapping a file
instead pulls in pages that nobody asked for, and what was "loaded" changes when the file does.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oslo_engine.errors import CheckpointError
from oslo_engine.shards import Span

MAX_HEADER_BYTES = 100_000_000
DIRECT_RUN_BYTES = 1 << 16  # column cuts whose runs are at least this long are read run by run, shorter ones by whole rows
CHUNK_BYTES = 1 << 22  # how many bytes of whole rows are held at once
IO_BYTES = 1 << 30  # the kernel moves at most 2 GiB in one call

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """What a written file must still be when it is read."""

    size_bytes: int
    sha256: str


class SafetensorsFile:
    """One file, opened and checked. Reads are independent of each other and of later changes to the directory.

    Raises:
        CheckpointError: the file is missing, truncated, or its header does not describe exactly its bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError("cannot open a file of the checkpoint", where=str(path), got=error.strerror) from None
        weakref.finalize(self, os.close, self._fd)
        self.specs, self._starts = self._read_header()

    def read(self, name: str, dim: int | None = None, spans: Sequence[Span] | None = None) -> Tensor:
        """Read a tensor, or the concatenation of ``spans`` along ``dim`` of it.

        Returns:
            A tensor in memory of its own, on the CPU.
        """
        spec, start = self.specs[name], self._starts[name]
        if dim is None or spans is None:
            dim, spans, shape = 0, ((0, spec.shape[0] if spec.shape else 1),), spec.shape
        else:
            shape = (*spec.shape[:dim], sum(b - a for a, b in spans), *spec.shape[dim + 1 :])
        whole = spec.shape or (1,)
        item_bytes = math.prod(whole[dim + 1 :]) * spec.dtype.itemsize
        rows = _Rows(start, math.prod(whole[:dim]), whole[dim] * item_bytes)
        buffer = torch.empty(math.prod(shape) * spec.dtype.itemsize, dtype=torch.uint8)
        self._read_columns(rows, [(a * item_bytes, b * item_bytes) for a, b in spans if b > a], buffer)
        return buffer.view(spec.dtype).reshape(shape)

    def _read_columns(self, rows: _Rows, columns: list[Span], buffer: Tensor) -> None:
        width = sum(b - a for a, b in columns)
        if not width or not rows.count:
            return
        if rows.count == 1 or min(b - a for a, b in columns) >= DIRECT_RUN_BYTES:
            view, at = _memory(buffer), 0
            for row in range(rows.count):
                for a, b in columns:
                    self._read_into(view[at : at + b - a], rows.start + row * rows.num_bytes + a)
                    at += b - a
            return
        out = buffer.view(rows.count, width)
        per_chunk = max(1, CHUNK_BYTES // rows.num_bytes)
        chunk = torch.empty(min(per_chunk, rows.count), rows.num_bytes, dtype=torch.uint8)
        for first in range(0, rows.count, per_chunk):
            num = min(per_chunk, rows.count - first)
            self._read_into(_memory(chunk[:num].view(-1)), rows.start + first * rows.num_bytes)
            at = 0
            for a, b in columns:
                out[first : first + num, at : at + b - a] = chunk[:num, a:b]
                at += b - a

    def _read_into(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done : done + IO_BYTES]], offset + done)
            if got == 0:
                raise self._wrong("the file was truncated while it was read", f"{len(view)} bytes at {offset}", f"{done} bytes")
            done += got

    # -- header

    def _read_header(self) -> tuple[dict[str, TensorSpec], dict[str, int]]:
        size = os.fstat(self._fd).st_size
        if size < 8:
            raise self._wrong("the file is too short for a safetensors file", "at least 8 bytes", f"{size} bytes")
        (length,) = struct.unpack("<Q", os.pread(self._fd, 8, 0))
        if length > (most := min(MAX_HEADER_BYTES, size - 8)):
            raise self._wrong("the header does not fit into the file", f"at most {most} bytes", f"{length} bytes")
        try:
            header = json.loads(os.pread(self._fd, length, 8).decode("utf-8"), object_pairs_hook=_no_repeats)
        except (ValueError, RecursionError) as error:
            raise self._wrong("the header is not JSON", "a safetensors header", str(error)) from None
        if not isinstance(header, dict):
            raise self._wrong("the header is not a JSON object", "tensor names", type(header).__name__)
        header.pop("__metadata__", None)
        specs = {name: self._spec(name, entry) for name, entry in header.items()}
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            if start != end or stop - start != specs[name].num_bytes:
                raise self._wrong(
                    f"the bytes of {name!r} are not where they must be",
                    f"{specs[name].num_bytes} bytes from {end}",
                    f"{start} to {stop}",
                )
            end = stop
        if 8 + length + end != size:
            raise self._wrong("the file has not the size that its header says", f"{8 + length + end} bytes", f"{size} bytes")
        return specs, {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}

    def _spec(self, name: str, entry: Any) -> TensorSpec:
        fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
        shape, offsets, code = (fields.get(key, ()) for key in ("shape", "data_offsets", "dtype"))
        if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2 and code in DTYPES):
            raise self._wrong(
                f"the entry of {name!r} is malformed",
                f"shape, two data_offsets, and a dtype of {', '.join(DTYPES)}",
                repr(entry)[:200],
            )
        return TensorSpec(DTYPES[code], tuple(shape))

    def _wrong(self, what: str, expected: str, got: str) -> CheckpointError:
        return CheckpointError(what, where=str(self.path), expected=expected, got=got, hint="copy or download the file again")


@dataclass(frozen=True)
class _Rows:
    """``count`` rows of ``num_bytes`` each, from byte ``start`` of the file."""

    start: int
    count: int
    num_bytes: int


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def write_safetensors(
    path: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor], *, metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write a file tensor by tensor; only one is asked for at a time.

    Args:
        specs: the tensors in the file.
        read: gives each of them when its turn comes, see ``write_order``.

    Returns:
        The size and checksum of the file, which is on the disk when this returns.
    """
    names = write_order(specs)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in names:
        spec = specs[name]
        if spec.dtype not in CODES:
            raise CheckpointError("safetensors has no such type", where=name, got=str(spec.dtype), expected=", ".join(DTYPES))
        header[name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [end, end + spec.num_bytes]}
        end += spec.num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        _write_all(file, memoryview(struct.pack("<Q", len(encoded)) + encoded), digest)
        for name in names:
            tensor = read(name)
            if (got := TensorSpec(tensor.dtype, tuple(tensor.shape))) != specs[name]:
                raise CheckpointError("a tensor is not what the header says", where=name, expected=specs[name], got=got)
            _write_all(file, as_bytes(tensor), digest)
        os.fsync(file.fileno())
    return FileRecord(8 + len(encoded) + end, digest.hexdigest())


def write_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The order of the tensors in a file: larger items first, so that all are aligned, then by name."""
    return sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return _memory(flat.view(torch.uint8))


def _memory(flat: Tensor) -> memoryview:
    return memoryview(flat.numpy().data)


def record_of(path: Path) -> FileRecord:
    """The size and checksum of a file as it is now."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(CHUNK_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def _write_all(file: Any, view: memoryview, digest: Any) -> None:
    digest.update(view)
    done = 0
    while done < len(view):
        done += file.write(view[done : done + IO_BYTES])
