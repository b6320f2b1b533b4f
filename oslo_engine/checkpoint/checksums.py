"""What a file was when it was written, and whether it still is.

Two checksums are kept of every file. One is SHA-256, which other tools know: ``sha256sum``, model hubs. A processor computes it
at the speed of a disk, so whoever read a checkpoint with it would wait for it. The other one is xxHash's XXH3 of 128 bits, ten
times as fast, with which files are compared whenever they are read. Neither protects from somebody who means harm, who would
write the manifest anew; by accident both change with any change of the file, but for one case in 2^128.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from oslo_engine.errors import CheckpointError


class Digest(Protocol):
    """What hashlib and xxhash have in common."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


ALGORITHMS: dict[str, Callable[[], Digest]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}  # the fastest first
READ_BYTES = 1 << 20  # at once; it stays in the processor's cache until it is hashed


@dataclass(frozen=True)
class FileRecord:
    """What a written file must still be when it is read.

    xxh3_128: None if it was written by a version that did not keep it; only the other one can be compared then.
    """

    size_bytes: int
    sha256: str
    xxh3_128: str | None = None

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> FileRecord:
        """Raises KeyError, TypeError or ValueError for what is none."""
        record = cls(entry["size_bytes"], entry["sha256"], entry.get("xxh3_128"))
        if not (type(record.size_bytes) is int and isinstance(record.sha256, str) and isinstance(record.xxh3_128, str | None)):
            raise ValueError(f"{entry} does not say what a file must be")
        return record


class Checksums:
    """The number and the checksums of bytes that come one after another."""

    def __init__(self, algorithms: Sequence[str] = tuple(ALGORITHMS)) -> None:
        self._size = 0
        self._digests = {name: ALGORITHMS[name]() for name in algorithms}

    def update(self, view: memoryview) -> None:
        self._size += len(view)
        for digest in self._digests.values():
            digest.update(view)

    def values(self) -> dict[str, Any]:
        """By the names of ``FileRecord``'s attributes."""
        return {"size_bytes": self._size} | {name: digest.hexdigest() for name, digest in self._digests.items()}

    def record(self) -> FileRecord:
        return FileRecord(**self.values())


def record_of(path: Path) -> FileRecord:
    """The size and both checksums of a file as it is now."""
    return _read(path, Checksums()).record()


def check_unaltered(path: Path, record: FileRecord, what: str, *, thorough: bool = False, hint: str = "copy it again") -> None:
    """Compare a file with its record.

    Args:
        what: of what kind it is, for the message.
        thorough: compare every checksum, not only the fastest that the record has.

    Raises:
        CheckpointError: it is another one, or there is none.
    """
    if not path.is_file():
        raise CheckpointError(f"{what} is missing", where=str(path), expected=f"{record.size_bytes} bytes", hint=hint)
    if (difference := find_difference(path, record, thorough=thorough)) is not None:
        expected, got = difference
        raise CheckpointError(f"{what} was altered after it was saved", where=str(path), expected=expected, got=got, hint=hint)


def find_difference(path: Path, record: FileRecord, *, thorough: bool = False) -> tuple[str, str] | None:
    """What a file should be and what it is, where it is not what its record says. See ``check_unaltered``."""
    there = [name for name in ALGORITHMS if getattr(record, name) is not None]
    checksums = _read(path, Checksums(there if thorough else there[:1]))
    for name, value in checksums.values().items():
        if value != getattr(record, name):
            return f"{name} {getattr(record, name)}", str(value)
    return None


def _read(path: Path, checksums: Checksums) -> Checksums:
    buffer = memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(buffer):
            checksums.update(buffer[:got])
    return checksums
