"""Doing something on every rank so that an error on one of them is an error on all, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from oslo_engine.errors import CheckpointError, OsloError

T = TypeVar("T")


def together(action: Callable[[], T], *, what: str, group: Any = None) -> list[T]:
    """Run ``action`` on every rank and exchange what it returned.

    Args:
        action: communicates nothing itself.
        what: what it does, for the error on the other ranks: "saving".
        group: of all ranks; another than the default one where a thread of its own does this.

    Returns:
        The results by rank; only this rank's without torch.distributed.

    Raises:
        OsloError: what the action raised on some rank; on the others with that rank's number. What the operating system
            refused is a CheckpointError on every rank, other errors of Python are one on the others.

    Communication: one all-gather of pickled objects over all ranks.
    """
    result: T | None = None
    mine: Exception | None = None
    try:
        result = action()
    except OSError as error:  # a full disk, a file that cannot be opened
        mine = CheckpointError(f"{what} failed", where=error.filename, got=error.strerror or str(error))
        mine.__cause__ = error
    except Exception as error:
        mine = error
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if mine is not None:
            raise mine
        return [result]  # type: ignore[list-item]
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (result, None if mine is None else _portable(mine, what)), group=group)
    if mine is not None:
        raise mine
    for _, theirs in outcomes:
        if theirs is not None:
            raise theirs
    return [result for result, _ in outcomes]


def _portable(error: Exception, what: str) -> OsloError:
    rank = dist.get_rank()
    if isinstance(error, OsloError):
        where = f"rank {rank}" if error.where is None else f"rank {rank}: {error.where}"
        expected, got = (None if value is None else str(value) for value in (error.expected, error.got))
        return type(error)(error.what, where=where, expected=expected, got=got, hint=error.hint)
    return CheckpointError(f"{what} failed on another rank", where=f"rank {rank}", got=f"{type(error).__name__}: {error}")
