"""Asking the kernel to begin writing to the disk what was just written to a file, while more is on its way.

Otherwise all of it may wait in memory until ``fsync`` at the end, and then the disk, idle until now, is waited for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, do not wait


def begin_writeback(descriptor: int, start: int, length: int) -> None:
    """A hint, for bytes ``start`` to ``start + length`` of an open file; ``fsync`` is needed all the same."""
    if (call := _sync_file_range()) is not None:
        call(descriptor, start, length, _WRITE)


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux alone has it, and Python does not offer it."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function
