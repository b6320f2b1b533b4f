"""Lines of a byte range of a file, however long they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from oslo_engine.data.units import TextRange

_BLOCK = 1 << 18
LONG_LINE = 1 << 22  # bytes; a longer line is not read but pointed at
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class LongLine:
    """A line that is better read in parts: bytes ``start`` to ``stop`` of a file, without the line end."""

    path: str
    start: int
    stop: int

    def windows(self, size: int = 1 << 20) -> Iterator[bytes]:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            position = self.start
            while position < self.stop:
                window = os.pread(descriptor, min(size, self.stop - position), position)
                if not window:
                    raise EOFError("the file was cut short while it was read")
                yield window
                position += len(window)
        finally:
            os.close(descriptor)

    def read(self) -> bytes:
        return b"".join(self.windows())


def lines_of(part: TextRange) -> Iterator[tuple[int, bytes | LongLine]]:
    """Each line that begins in the range: where, and its bytes without the line feed."""
    with open(part.path, "rb", buffering=0) as file:
        position = _first_line(file.fileno(), part)
        file.seek(position)
        rest = b""
        while position < part.stop:
            block = file.read(_BLOCK)
            if not block:
                if rest:
                    yield position, rest
                return
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if position >= part.stop:
                    return
                yield position, line
                position += len(line) + 1
            if len(rest) > LONG_LINE and position < part.stop:
                end, found = _line_end(file.fileno(), position + len(rest))
                yield position, LongLine(part.path, position, end)
                position = end + found
                file.seek(position)
                rest = b""


def _first_line(descriptor: int, part: TextRange) -> int:
    """Where the first line begins at or after the start of the range; its end where there is none."""
    if part.start == 0:
        return len(_BYTE_ORDER_MARK) if os.pread(descriptor, 3, 0) == _BYTE_ORDER_MARK else 0
    position = part.start - 1  # a line begins at the start itself if the byte before ends one
    while position < part.stop:
        window = os.pread(descriptor, min(_BLOCK, part.stop - position), position)
        at = window.find(b"\n")
        if at >= 0:
            return position + at + 1
        if not window:
            break
        position += len(window)
    return part.stop


def _line_end(descriptor: int, position: int) -> tuple[int, bool]:
    while window := os.pread(descriptor, _BLOCK, position):
        at = window.find(b"\n")
        if at >= 0:
            return position + at, True
        position += len(window)
    return position, False


def line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line that begins at a byte of the file."""
    count = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            count += block.count(b"\n")
            offset -= len(block)
    return count
