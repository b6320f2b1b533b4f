"""Replacing a checkpoint folder so that at every moment one whole checkpoint is there, the old one or the new one.

1. The new files are written into a hidden folder beside the target (``.NAME.saving``), the manifest last, all of it fsynced.
2. The two folders are exchanged in one step, or the new one is renamed where there was none.
3. What else lay in the target (a tokenizer, a README, other folders) moves over, and the old checkpoint is deleted.

Killed before the exchange, a save leaves the old checkpoint untouched and a hidden folder that nothing reads; killed after it,
the new checkpoint, with step 3 left to ``recover``, which readers and the next save call.

Some targets cannot be exchanged (NFS; mount points), and the current folder must not be: who stands in it, as the shell does,
would be left in the old one. Their files are put in place one by one: the old manifest goes first, the new one comes last, so
that in between nothing loads, and ``recover`` goes on where it stopped.

Whoever saves holds a lock on its hidden folder, which ends with its process. A second save into the same target is refused
while the first one lives; what a dead one left is cleared away.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from oslo_engine.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "layout.json"
EXCHANGED = ".exchanged"  # in a target whose former content still stands in the hidden folder
MOVING = ".moving"  # in a hidden folder whose files are being put in place one by one; lists them all

# Files that make up a checkpoint, ours or Transformers': a save replaces them as a set. Everything else is the user's.
CHECKPOINT_FILES = (
    MANIFEST,
    "model_tp=*_pp=*.safetensors",
    "pytorch_model_tp=*_pp=*.bin",
    "training.json",
    "optimizer.json",
    "optimizer_tp=*_pp=*.safetensors",
    "objects.pt",
    "random_rank=*.pt",
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model-?????-of-?????.bin",
    "pytorch_model.bin.index.json",
    ".metadata",
    "__*.distcp",
    "shard-?????-model-?????-of-?????.safetensors",
)
# The files that make a loader look for others: first to go, last to come.
ENTRY_POINTS = (
    MANIFEST,
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    ".metadata",
)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_ours: dict[Path, int] = {}  # the hidden folders that this process writes into, held open and locked
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EBUSY, errno.EXDEV, errno.EOPNOTSUPP)


def staging_folder(target: Path) -> Path:
    """Where the files of a save into ``target`` are written. The same on every rank."""
    target = Path(os.path.realpath(target))
    return target / ".saving" if os.path.ismount(target) else target.parent / f".{target.name}.saving"


def begin(target: Path) -> Path:
    """Finish or clear away what an earlier save left, and make an empty folder to write into.

    Raises:
        CheckpointError: the target cannot hold a checkpoint, or is being written to.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError("the place to save to is a file", where=str(target), expected="a folder, or nothing yet")
    if target.exists() and not os.access(target, os.W_OK):
        raise CheckpointError("cannot write there", where=str(target), got="the folder is not to be written to")
    staging = staging_folder(target)
    try:
        staging.parent.mkdir(parents=True, exist_ok=True)
        recover(target)
        with _locked(staging.parent):
            if staging.exists():
                _refuse_if_alive(staging, target)
                logger.warning("%s: cleared away what a save that did not finish had left", staging)
                shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            _ours[staging] = os.open(staging, os.O_RDONLY)
            _lock_if_free(_ours[staging])
    except OSError as error:
        raise CheckpointError("cannot write there", where=str(target), got=str(error)) from None
    return staging


def commit(staging: Path, target: Path) -> None:
    """Put the finished files of ``staging``, which ``begin`` made, in the place of the checkpoint in ``target``.

    Raises:
        CheckpointError: another process has written into ``staging``, or what else lay in the target cannot be moved.
    """
    _check_ours(staging, target)
    _put_in_place(staging, Path(os.path.realpath(target)))
    _let_go(staging)


def _put_in_place(staging: Path, target: Path) -> None:
    (staging / EXCHANGED).touch()
    for path in staging.iterdir():
        sync(path)
    sync(staging)
    with _locked(staging.parent):
        if staging.parent != target and not _must_stay(target) and _swap(staging, target):
            sync(target.parent)
            try:
                _take_over(staging, target)
            except OSError as error:
                raise CheckpointError(
                    "the new checkpoint is in place, but other files that lay there cannot be moved to it",
                    where=str(target),
                    got=str(error),
                    hint=f"see what holds them; the next save or load moves them. They are in {staging}: do not delete it",
                ) from None
        else:
            (staging / EXCHANGED).unlink()
            (staging / MOVING).write_text(json.dumps(sorted(path.name for path in staging.iterdir())))
            sync(staging / MOVING)
            sync(staging)
            _move_in(staging, target)


def abandon(target: Path) -> None:
    """Clear away what a save that failed has written so far, unless it is in the middle of being put in place.

    What another process writes there is not touched.
    """
    target, staging = Path(os.path.realpath(target)), staging_folder(target)
    if _is_ours(staging):
        with _locked(staging.parent):
            if not ((target / EXCHANGED).exists() or (staging / MOVING).exists()):
                shutil.rmtree(staging, ignore_errors=True)
    _let_go(staging)


@contextlib.contextmanager
def abandoned_on_error(target: Path, here: bool = True) -> Iterator[None]:
    """``abandon`` if the save inside fails; ``here``: whether this rank is the one to do it."""
    try:
        yield
    except BaseException:
        if here:
            abandon(target)
        raise


def recover(target: Path) -> None:
    """Finish a save that was killed while its files were put in place; does nothing where there was none."""
    target, staging = Path(os.path.realpath(target)), staging_folder(target)
    if not ((target / EXCHANGED).exists() or (staging / MOVING).exists()):
        return
    with _locked(staging.parent):  # waits for a save that is alive
        if (staging / MOVING).exists():
            _move_in(staging, target)
        elif (target / EXCHANGED).exists():
            _take_over(staging, target)


def is_checkpoint_file(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in CHECKPOINT_FILES)


def sync(path: Path) -> None:
    """Make sure that a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock under which hidden folders beside or in targets change; a process that dies lets go of it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _must_stay(target: Path) -> bool:
    """Whether the folder cannot be exchanged with another one: it is the current one, or something is mounted in it."""
    try:
        return os.path.samefile(target, os.curdir) or any(map(os.path.ismount, target.iterdir()))
    except OSError:  # there is none yet, or no current one any more
        return False


def _let_in_whom_it_lets_in(staging: Path, target: Path) -> None:
    """Give the new folder the owner, the group and the mode of the one that it replaces, as far as we may."""
    of_target = target.stat()
    with contextlib.suppress(OSError):
        os.chown(staging, of_target.st_uid, of_target.st_gid)
    os.chmod(staging, stat.S_IMODE(of_target.st_mode))


def _lock_if_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _refuse_if_alive(staging: Path, target: Path) -> None:
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        if not _lock_if_free(descriptor):
            raise CheckpointError(
                "another save into this folder is running",
                where=str(target),
                got=f"{staging} is in use",
                hint="wait until it has ended, or choose another folder",
            )
    finally:
        os.close(descriptor)


def _is_ours(staging: Path) -> bool:
    try:
        return staging in _ours and os.path.samestat(os.fstat(_ours[staging]), os.stat(staging))
    except OSError:  # gone, or gone stale
        return False


def _check_ours(staging: Path, target: Path) -> None:
    """Where the file system has no locks, another save may have taken the folder for what a dead one left."""
    if not _is_ours(staging):
        raise CheckpointError(
            "another save into this folder has begun meanwhile",
            where=str(target),
            got=f"{staging} is not the folder that this save wrote into",
            hint="save again when the other one has ended",
        )


def _let_go(staging: Path) -> None:
    if (descriptor := _ours.pop(staging, None)) is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for children that were forked meanwhile
        os.close(descriptor)


def _swap(staging: Path, target: Path) -> bool:
    """Exchange the folders, or rename where there is no target; False where the file system cannot."""
    try:
        if target.exists():
            _let_in_whom_it_lets_in(staging, target)
            _exchange(staging, target)
        else:
            os.rename(staging, target)
    except OSError as error:
        if error.errno not in _CANNOT_EXCHANGE:
            raise
        return False
    return True


def _exchange(first: Path, second: Path) -> None:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(first))


def _take_over(old: Path, target: Path) -> None:
    """Keep from the former content of ``target``, now in ``old``, what is not part of a checkpoint, and delete the rest."""
    for path in list(old.iterdir()) if old.exists() else []:
        if not is_checkpoint_file(path.name) and not os.path.lexists(target / path.name):
            os.rename(path, target / path.name)
    shutil.rmtree(old, ignore_errors=True)
    (target / EXCHANGED).unlink(missing_ok=True)
    sync(target)


def _move_in(staging: Path, target: Path) -> None:
    """Put the files that ``MOVING`` lists in place, as many of them as are still to be moved."""
    names = json.loads((staging / MOVING).read_text())
    left = [name for name in names if (staging / name).exists()]
    if any(name in ENTRY_POINTS for name in left):
        target.mkdir(exist_ok=True)
        for name in ENTRY_POINTS:
            (target / name).unlink(missing_ok=True)
        sync(target)
        for name in left:
            if name not in ENTRY_POINTS:
                _place(staging / name, target / name)
        for path in list(target.iterdir()):
            if is_checkpoint_file(path.name) and path.name not in names:
                path.unlink()
        for name in left:
            if name in ENTRY_POINTS:
                _place(staging / name, target / name)
        sync(target)
    shutil.rmtree(staging)


def _place(source: Path, destination: Path) -> None:
    try:
        os.replace(source, destination)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = destination.with_name(f".{destination.name}.saving")
        shutil.copyfile(source, beside)
        sync(beside)
        os.replace(beside, destination)
