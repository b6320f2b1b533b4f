"""Two things that the kernel is told about a file that is being written, so that its disk has less to do at the end.

Python offers neither, and they are Linux's alone; elsewhere, and on file systems that do not know them, nothing is done.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, do not wait
_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def begin_writeback(descriptor: int, start: int, length: int) -> None:
    """Begin to write bytes ``start`` to ``start + length`` to the disk. A hint: ``fsync`` is needed all the same.

    Otherwise all of it may wait in memory until ``fsync``, and then the disk, idle until now, is waited for.
    """
    if (call := _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)) is not None:
        call(descriptor, start, length, _WRITE)


def reserve(descriptor: int, size: int) -> None:
    """Give a file its size and its place on the disk before it is written.

    ``os.posix_fallocate`` would write all of it where the file system cannot do this.

    Raises:
        OSError: there is no place for it.
    """
    call = _function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call is not None and size and call(descriptor, 0, 0, size) and (code := ctypes.get_errno()) in _NO_PLACE:
        raise OSError(code, os.strerror(code))


@cache
def _function(name: str, *types: type) -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = types
    return function
