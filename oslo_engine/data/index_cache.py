"""Arrays that are costly to compute, kept on disk and shared by all processes that need the same.

The name of an entry is a digest of everything it follows from, so a stale one is never found. It is written into a folder of
its own and renamed at the end. Several processes may compute the same entry at once; the first to finish puts it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]
_KEPT = 8  # entries of one folder; those that were used longest ago go


def content_key(*parts: object) -> str:
    """A digest of arrays, numbers and words."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def cached_arrays(folder: Path, key: str, build: Callable[[], Arrays]) -> Arrays:
    """What ``build`` returns, mapped from the folder; computed and put there if it is not.

    Where the folder cannot be written, the arrays stay in memory, with a warning.
    """
    entry = folder / key
    if (found := _read(entry)) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if (found := _read(entry)) is not None:  # another process was faster
                return found
            _write(entry, build())
            _forget_old(folder, entry)
        found = _read(entry)
    except OSError as error:
        logger.warning("%s: not cached: %s", folder, error)
    return build() if found is None else found


def _read(entry: Path) -> Arrays | None:
    try:
        sizes = json.loads((entry / "sizes.json").read_text(encoding="utf-8"))
        arrays: Arrays = {}
        for name, size in sizes.items():
            path = entry / f"{name}.npy"
            if path.stat().st_size != size:
                raise ValueError(f"{path} has the wrong size")
            arrays[name] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        os.utime(entry)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s: damaged, and computed anew: %s", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None
    return arrays


def _write(entry: Path, arrays: Arrays) -> None:
    beside = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))
    try:
        sizes = {}
        for name, array in arrays.items():
            with open(beside / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
                sizes[name] = file.tell()
        (beside / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")
        os.replace(beside, entry)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _forget_old(folder: Path, newest: Path) -> None:
    entries = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in entries[:-_KEPT]:
        if path != newest:
            shutil.rmtree(path, ignore_errors=True)  # who has it mapped keeps it


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the work is done twice
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
