"""Three ways to read the tokens of a ``.bin`` file.

``mmap`` maps the file: nothing is copied, the operating system keeps what is used. ``lazy`` reads each range when it is asked
for: for file systems that map badly (network), and for memory that must not be counted as this process's. ``cached`` reads
everything at the start.

What is read stays valid when its reader is gone: it is a copy, or it holds on to the mapping.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oslo_engine.errors import DataError


class TokenReader(Protocol):
    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens ``start`` to ``stop`` of the file; not to be written to."""
        ...


class MappedTokens:
    def __init__(self, path: Path, dtype: np.dtype[Any], num_tokens: int) -> None:
        # A base class view: slicing an np.memmap costs five times as much. An empty file cannot be mapped.
        self._tokens = np.asarray(np.memmap(path, mode="r", dtype=dtype)) if num_tokens else np.empty(0, dtype)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        return self._tokens[start:stop]


class LazyTokens:
    def __init__(self, path: Path, dtype: np.dtype[Any], num_tokens: int) -> None:
        self._path, self._dtype = path, dtype
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        tokens = np.empty(max(stop - start, 0), self._dtype)
        rest, position = memoryview(tokens.view(np.uint8).data), start * self._dtype.itemsize
        while rest:
            count = os.preadv(self._descriptor, [rest], position)
            if not count:
                raise DataError("a data set was cut short while it was read", where=str(self._path))
            rest, position = rest[count:], position + count
        tokens.flags.writeable = False
        return tokens


class CachedTokens:
    def __init__(self, path: Path, dtype: np.dtype[Any], num_tokens: int) -> None:
        self._tokens = LazyTokens(path, dtype, num_tokens).read(0, num_tokens)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        return self._tokens[start:stop]


READERS: dict[str, type[MappedTokens] | type[LazyTokens] | type[CachedTokens]] = {
    "mmap": MappedTokens,
    "lazy": LazyTokens,
    "cached": CachedTokens,
}


def check_implementation(name: str) -> str:
    if name not in READERS:
        raise DataError("no such way to read a data set", expected=f"one of {', '.join(READERS)}", got=repr(name))
    return name
