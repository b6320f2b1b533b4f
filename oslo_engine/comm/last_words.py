"""When one rank ends, the others end too, and say why.

A rank that raises while its peers are inside a collective leaves them waiting until a timeout of many minutes, unless its
connections break, and then they only know that they broke. So an uncaught exception is written into the job's store before the
process ends. A thread on every rank looks there once a second; where the main thread does not notice by itself, which it cannot
inside a collective, the thread prints the cause and ends the process.

A rank that is killed leaves no words: with gloo its peers see a broken connection and become the ones that tell the rest; with
NCCL the launcher ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any

import torch.distributed as dist

_FAILED, _ENDED = "oslo_engine/failed", "oslo_engine/ended"
_LOOK_EVERY_S = 1.0
_GRACE_S = 2.0  # for the main thread to fail by itself, with a traceback that tells more
_watched: list[Any] = []


def watch_each_other() -> None:
    """Begin to watch, once for each time that torch.distributed is initialised. Communication: none but through the store."""
    world = dist.group.WORLD
    if dist.get_world_size() == 1 or world in _watched:
        return
    _watched[:] = [world]
    _Watch(dist.distributed_c10d._get_default_store(), dist.get_rank(), world).begin()


class _Watch:
    """What one rank tells and hears. store: of the job. world: the default process group; another one ends this watch."""

    def __init__(self, store: Any, rank: int, world: Any) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._failed = False
        self._next_hook = sys.excepthook

    def begin(self) -> None:
        sys.excepthook = self._last_words
        atexit.register(self._farewell)
        threading.Thread(target=self._look, name="oslo_engine: other ranks", daemon=True).start()

    def _last_words(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._failed = True
        self._next_hook(kind, error, trace)
        if self._world is not dist.group.WORLD:
            return
        first = self._first_failure()
        if first is None:
            first = f"rank {self._rank}: {kind.__name__}: {error}"
            gone = self._ended_without_error()
            if gone:
                first += f"\n(rank {gone} had ended before, without an error: did it have fewer batches?)"
            with contextlib.suppress(Exception):  # the store may have gone with rank 0
                self._store.set(_FAILED, first)
        _say(f"rank {self._rank} ends; the first to fail was {first}")
        time.sleep(_LOOK_EVERY_S + 0.5)  # the store may live in this process

    def _farewell(self) -> None:
        if not self._failed and self._world is dist.group.WORLD:
            with contextlib.suppress(Exception):
                self._store.set(_ENDED, str(self._rank))

    def _look(self) -> None:
        while self._world is dist.group.WORLD and not self._failed:
            time.sleep(_LOOK_EVERY_S)
            first = self._first_failure()
            if first is not None:
                time.sleep(_GRACE_S)
                if not self._failed:
                    _say(f"rank {self._rank} ends, since another rank has failed: {first}")
                    os._exit(1)

    def _first_failure(self) -> str | None:
        return self._read(_FAILED)

    def _ended_without_error(self) -> str | None:
        return self._read(_ENDED)

    def _read(self, key: str) -> str | None:
        with contextlib.suppress(Exception):
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        return None


def _say(text: str) -> None:
    print(f"oslo_engine: {text}", file=sys.stderr, flush=True)
