"""The folder that a parent and its workers share, and what clears those away whose parent is gone.

A parent that is killed removes nothing, and its workers may be killed before they could. So each folder has a file that its
parent holds a lock on: the system frees the lock at the parent's end, however that comes. Whoever gets it may remove the
folder: the process that workers are forked from, when it ends with the parent, and every later start of the same user.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX, _LOCK = "oslo-deploy-", "parent"


class SharedFolder:
    """A new folder; ``path`` leads to it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        making = self.path / "making"
        self._lock: int | None = os.open(making, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        making.rename(self.path / _LOCK)  # under this name it is never seen without its lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def clear_left_behind() -> None:
    """Remove the folders of this user's parents that are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another's, or removed meanwhile
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
