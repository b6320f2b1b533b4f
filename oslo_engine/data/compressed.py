"""Whole lines of compressed files, a block at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oslo_engine.data.units import LineBlock
from oslo_engine.errors import DataError, MissingDependencyError

COMPRESSIONS = (".gz", ".zst")
_READ = 1 << 18
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def line_blocks(path: Path, compression: str, json_key: str | None, block_bytes: int) -> Iterator[LineBlock]:
    """Blocks of whole lines, of about ``block_bytes`` bytes each.

    Raises:
        DataError: the file is damaged or cut short.
    """
    rest: list[bytes] = []
    size = num_read = 0
    line = 1
    for read, block in _decompressed(path, compression):
        if line == 1 and not rest:
            block = block.removeprefix(_BYTE_ORDER_MARK)
        rest.append(block)
        size += len(block)
        num_read += read
        if size >= block_bytes and b"\n" in block:
            whole, found, begun = b"".join(rest).rpartition(b"\n")
            content = whole + found
            yield LineBlock(str(path), line, content, json_key, num_read)
            line += content.count(b"\n")
            rest, size, num_read = [begun], len(begun), 0
    content = b"".join(rest)
    if content or num_read:
        yield LineBlock(str(path), line, content, json_key, num_read)


def _decompressed(path: Path, compression: str) -> Iterator[tuple[int, bytes]]:
    """How many bytes were read, and what came of them. Several streams may follow one another in a file."""
    stream: Any = None
    try:
        with open(path, "rb") as file:
            while block := file.read(_READ):
                read = len(block)
                while block:
                    stream = stream or _new_stream(compression)
                    yield read, stream.decompress(block)
                    read, block = 0, b""
                    if stream.eof:
                        block, stream = stream.unused_data, None
                        if compression == ".gz":
                            block = block.lstrip(b"\0")  # padding, as gzip allows
    except OSError as error:
        raise DataError("cannot read a file", where=str(path), got=error.strerror) from None
    except Exception as error:
        if isinstance(error, zlib.error) or type(error).__name__ == "ZstdError":
            raise DataError("a compressed file is damaged", where=str(path), got=error) from None
        raise
    if stream is not None:
        raise DataError("a compressed file was cut short", where=str(path), hint="fetch it again")


def _new_stream(compression: str) -> Any:
    if compression == ".gz":
        return zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError("zst files need zstandard", hint="pip install 'oslo-engine[data]'") from None
    return zstandard.ZstdDecompressor().decompressobj()
