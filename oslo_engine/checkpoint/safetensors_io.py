"""Reading and writing safetensors files by byte ranges.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes one after another. The header is
checked before any of it is used. Reading copies the wanted ranges, and only these, into buffers of its own: mapping a file
instead pulls in pages that nobody asked for, and what was "loaded" changes when the file does.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oslo_engine.checkpoint.checksums import ALGORITHMS, Checksums, FileRecord
from oslo_engine.checkpoint.ranges import (
    IO_BYTES,
    Piece,
    ReadOnlyFile,
    StoredArray,
    TensorSpec,
    consecutive,
    memory,
    resized,
)
from oslo_engine.checkpoint.writeback import begin_writeback, reserve
from oslo_engine.errors import CheckpointError
from oslo_engine.shards import Span

MAX_HEADER_BYTES = 100_000_000
WORTH_A_THREAD = 1 << 16  # fewer bytes are hashed at once

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


class SafetensorsFile:
    """One file, opened and checked. Reads are independent of each other and of later changes to the directory.

    Attributes:
        specs: the tensors in it.
        metadata: the texts in its header.

    Raises:
        CheckpointError: the file is missing, truncated, or its header does not describe exactly its bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = ReadOnlyFile(path)
        self.specs, self.metadata, self._starts = self._read_header()

    def read_into(self, name: str, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
        """Read pieces of a tensor; see ``ReadOnlyFile.read_into``."""
        self._file.read_into(StoredArray(self.specs[name], self._starts[name]), out, dim, pieces)

    def read(self, name: str, dim: int | None = None, spans: Sequence[Span] | None = None) -> Tensor:
        """Read a tensor, or the concatenation of ``spans`` along ``dim`` of it.

        Returns:
            A tensor in memory of its own, on the CPU.
        """
        spec = self.specs[name]
        if dim is None or spans is None:
            dim, spans = 0, ((0, spec.shape[0] if spec.shape else 1),)
        pieces, size = consecutive(spans)
        out = torch.empty(resized(spec.shape, dim, size), dtype=spec.dtype)
        self.read_into(name, out, dim, pieces)
        return out

    def map(self) -> dict[str, Tensor]:
        """All tensors, mapped: a page is read when it is touched, and may be dropped again."""
        mapped = mmap.mmap(self._file.descriptor, 0, access=mmap.ACCESS_COPY) if self.specs else b""
        return {
            name: torch.frombuffer(mapped, dtype=spec.dtype, count=count, offset=self._starts[name]).reshape(spec.shape)
            if (count := math.prod(spec.shape))
            else torch.empty(spec.shape, dtype=spec.dtype)
            for name, spec in self.specs.items()
        }

    # -- header

    def _read_header(self) -> tuple[dict[str, TensorSpec], dict[str, str], dict[str, int]]:
        size = self._file.size
        if size < 8:
            raise self._wrong("the file is too short for a safetensors file", "at least 8 bytes", f"{size} bytes")
        (length,) = struct.unpack("<Q", self._file.read_bytes(0, 8))
        if length > (most := min(MAX_HEADER_BYTES, size - 8)):
            raise self._wrong("the header does not fit into the file", f"at most {most} bytes", f"{length} bytes")
        try:
            header = json.loads(self._file.read_bytes(8, length).decode("utf-8"), object_pairs_hook=_no_repeats)
        except (ValueError, RecursionError) as error:
            raise self._wrong("the header is not JSON", "a safetensors header", str(error)) from None
        if not isinstance(header, dict):
            raise self._wrong("the header is not a JSON object", "tensor names", type(header).__name__)
        metadata = header.pop("__metadata__", None)
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
        starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
        return specs, metadata if isinstance(metadata, dict) else {}, starts

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


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


class SafetensorsWriter:
    """A file that is written tensor by tensor, in ``write_order``; it is hashed by a thread of its own meanwhile.

    Args:
        specs: the tensors in the file.
        metadata: further texts for the header.
        algorithms: of the checksums that will be kept.

    Raises:
        OSError: there is no place for it, which is found out before anything is written where the file system can tell.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
        algorithms: Sequence[str] = tuple(ALGORITHMS),
    ) -> None:
        header = _header_bytes(specs, metadata)
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        reserve(self._file.fileno(), len(header) + sum(spec.num_bytes for spec in specs.values()))
        self._checksums, self._hashes = Checksums(algorithms), bool(algorithms)
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        self._size = 0
        self.write(memoryview(header))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()
        self._file.close()

    def write(self, view: memoryview) -> Future[None] | None:
        """Append the next bytes.

        Returns:
            What is done when they are hashed, before which they must not change; None if they are.
        """
        hashed = None
        if self._hashes and len(view) >= WORTH_A_THREAD:
            hashed = self._thread.submit(self._hash, [view])
        else:
            self._settle()
            self._checksums.update(view)
        self._last = hashed
        done = 0
        while done < len(view):
            done += self._file.write(view[done : done + IO_BYTES])
        if len(view) >= WORTH_A_THREAD:
            begin_writeback(self._file.fileno(), self._size, len(view))
        self._size += len(view)
        return hashed

    def _settle(self) -> None:
        if self._last is not None:
            self._last.result()

    def _hash(self, box: list[memoryview]) -> None:
        """Takes the view out of its box, so that the executor, which may be late to clear up, does not keep its memory."""
        self._checksums.update(box.pop())

    def finish(self) -> Future[Checksums]:
        """Its checksums, to be had once it is on the disk. The thread that hashes it sees to that: others may be written."""
        return self._thread.submit(self._finish)

    def _finish(self) -> Checksums:
        os.fsync(self._file.fileno())
        return self._checksums


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
    with SafetensorsWriter(path, specs, metadata=metadata) as writer:
        for name in write_order(specs):
            hashed = writer.write(_checked_bytes(name, read(name), specs[name]))
            if hashed is not None:
                hashed.result()
        return writer.finish().result().record()


def size_of_file(specs: Mapping[str, TensorSpec]) -> int:
    """How large a file of these tensors is."""
    return len(_header_bytes(specs, None)) + sum(spec.num_bytes for spec in specs.values())


def _checked_bytes(name: str, tensor: Tensor, spec: TensorSpec) -> memoryview:
    if (got := TensorSpec(tensor.dtype, tuple(tensor.shape))) != spec:
        raise CheckpointError("a tensor is not what the header says", where=name, expected=spec, got=got)
    return as_bytes(tensor)


def _header_bytes(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    """The length of the header, and the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in write_order(specs):
        spec = specs[name]
        if spec.dtype not in CODES:
            raise CheckpointError("safetensors has no such type", where=name, got=str(spec.dtype), expected=", ".join(DTYPES))
        header[name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [end, end + spec.num_bytes]}
        end += spec.num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def write_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The order of the tensors in a file: larger items first, so that all are aligned, then by name."""
    return sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memory(flat.view(torch.uint8))
