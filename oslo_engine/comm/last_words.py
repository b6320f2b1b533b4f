"""When one rank ends, the others end too, and say why.

A rank that raises while its peers are inside a collective leaves them waiting until a timeout of many minutes, unless its
connections break, and then they only know that they broke. So an uncaught exception is written into the job's store before the
process ends. A thread on every rank looks there once a second; where the main thread does not notice by itself, which it cannot
inside a collective, the thread prints the cause and ends the process.

The thread also writes that its rank is alive, and where it stands (see ``calls``), and looks at where its neighbours stand: so
an exception that somebody caught on one rank only, or a rank that saves while the others train, ends the job with the cause.
A rank that is killed leaves no words. Its peers see a broken connection; one of them then finds out who is not alive any more.
With NCCL they see nothing, and the launcher ends the job.
A rank that is stopped (SIGSTOP), or whose machine hangs, breaks no connection. Its line in the store stands still, and a rank
that waits for it ends the job. The line is written by a thread of its own, so whatever the main thread does, it is renewed,
unless something holds Python's lock all that time; hence the long limit.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch.distributed as dist

from oslo_engine.comm.calls import Calls, Standing, gone_apart, is_of_connections, left_behind

_FAILED, _ENDED, _FINDS_OUT = "oslo_engine/failed", "oslo_engine/ended", "oslo_engine/finds out"
_LOOK_EVERY_S = 1.0
_GRACE_S = 1.5  # for the main thread to fail by itself, with a traceback that tells more
_SILENT_S = 2.5  # without a sign of life
_TEARDOWN_S = 2.5  # of the interpreter, after the last words
_STOPPED_S, _STOPPED_BY_DEFAULT_S = "OSLO_ENGINE_STOPPED_S", "120"  # a line that stands still; 0: for ever
_WAITING = ("torch/autograd/graph.py", "torch/distributed/distributed_c10d.py")  # backward, and collectives
_watches: list[_Watch] = []


def watch_each_other(calls: Calls) -> None:
    """Begin to watch, once for each time that torch.distributed is initialised; from now on over these calls too.

    Communication: none but through the store.
    """
    world = dist.group.WORLD
    if dist.get_world_size() == 1:
        return
    if not _watches or not _watches[0].watches(world):
        store: Any = dist.distributed_c10d._get_default_store()
        _watches[:] = [_Watch(store.clone(), dist.get_rank(), dist.get_world_size(), world)]
        _watches[0].begin()
    _watches[0].add(calls)


class _Watch:
    """What one rank tells and hears.

    store: of the job, over a connection of its own: the job's may be in use for a long time.
    world: the default process group; another one ends this watch.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, world: Any) -> None:
        self._store, self._rank, self._num_ranks, self._world = store, rank, num_ranks, world
        self._calls: list[Calls] = []
        self._suspected: dict[tuple[str, int, str], float] = {}
        self._still: dict[int, tuple[Any, int]] = {}
        self._stopped_s = float(os.environ.get(_STOPPED_S, _STOPPED_BY_DEFAULT_S))
        self._main = threading.main_thread().ident
        self._beat, self._place = 0, f"process {os.getpid()} on {socket.gethostname()}"
        self._failed = self._store_is_gone = False
        self._first: str | None = None  # kept, since the store may be gone when the main thread comes to ask
        self._next_hook = sys.excepthook
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="oslo_engine: other ranks", daemon=True)

    def watches(self, world: Any) -> bool:
        return self._world is world

    def begin(self) -> None:
        self._show_life()
        sys.excepthook = self._last_words
        atexit.register(self._farewell)
        self._thread.start()

    def add(self, calls: Calls) -> None:
        if len(calls.model_ranks) > 1:
            calls.tell = lambda: self._tell(calls)
            calls.wait_until_failed_everywhere = lambda: self._wait_until_failed_everywhere(calls)
            self._calls = [*self._calls, calls]

    # The end of this rank

    def _last_words(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._failed = True
        self._next_hook(kind, error, trace)
        if not self._goes_on():
            return
        first = self._first_failure()
        if first is None:
            first = self._explained(error)
            self._write(_FAILED, first)
        _say(f"rank {self._rank} ends; the first to fail was {first}")
        time.sleep(_LOOK_EVERY_S + 0.3)  # the store may live in this process
        # Broken process groups may take long to be torn down. This ends the process without Python, which is ending by then.
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115
        faulthandler.dump_traceback_later(_TEARDOWN_S, exit=True, file=self._nowhere)

    def _explained(self, error: BaseException) -> str:
        text = f"rank {self._rank}: {type(error).__name__}: {error}"
        gone = self._ended_without_error()
        if gone:
            return f"{text}\n(rank {gone} had ended before, without an error: did it have fewer batches?)"
        if not is_of_connections(error):
            return text
        who = self._who_is_silent()
        return self._first_failure() or (f"{who}\n(seen by {text})" if who else text)

    def _who_is_silent(self) -> str | None:
        """Who shows no sign of life; one rank finds out, and the others hear of it. Takes some seconds."""
        try:
            chosen = self._store.compare_set(_FINDS_OUT, "", str(self._rank)).decode() == str(self._rank)
            if not chosen:
                self._wait_for_the_one_who_finds_out()
                return None
            others = [rank for rank in range(self._num_ranks) if rank != self._rank]
            before = {rank: self._read(_alive(rank)) for rank in others}
            self._over.wait(_SILENT_S)
            silent = [rank for rank in others if before[rank] and self._store.get(_alive(rank)).decode() == before[rank]]
        except Exception:
            return "the store of the job is gone, and with it the process that kept it: rank 0, or the launcher"
        named = [f"rank {rank} ({before[rank].split('|')[1]})" for rank in silent]  # type: ignore[union-attr]
        return f"{', '.join(named)} ended without a word: killed by a signal, or for want of memory?" if named else None

    def _wait_for_the_one_who_finds_out(self) -> None:
        deadline = time.monotonic() + 2 * _SILENT_S
        while self._first_failure() is None and time.monotonic() < deadline:
            time.sleep(0.1)  # not longer: it may be the one that keeps the store

    def _farewell(self) -> None:
        # Python ends a thread that it finds inside the store by force, which takes the whole process down.
        self._over.set()
        self._thread.join(_LOOK_EVERY_S)
        if not self._failed and self._goes_on():
            self._write(_ENDED, str(self._rank))

    # The end of others

    def _look(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S) and self._goes_on():
            self._show_life()
            if self._failed:
                continue
            first = self._first_failure() or self._what_went_wrong()
            if first is not None and not self._over.wait(_GRACE_S) and not self._failed:
                _say(f"rank {self._rank} ends, since another rank has failed: {first}")
                os._exit(1)

    def _show_life(self) -> None:
        self._beat += 1
        self._write(_alive(self._rank), f"{self._beat}|{self._place}")

    def _what_went_wrong(self) -> str | None:
        """What no other rank has noticed; it is written down for all."""
        for calls in self._calls:
            self._tell(calls)
            found = self._apart_from(calls, calls.tp_ranks, left_behind) or self._apart_from(
                calls, calls.model_ranks, gone_apart
            )
            found = found or self._stands_still(calls)
            if found is not None:
                self._write(_FAILED, found)
                return found
        return None

    def _stands_still(self, calls: Calls) -> str | None:
        """What to say of the next rank, if it gives no sign of life while this one waits for it.

        Looks are counted and not seconds: this rank may have been stopped too.
        """
        peer = calls.model_ranks[(calls.model_ranks.index(self._rank) + 1) % len(calls.model_ranks)]
        line = self._read(_alive(peer))
        if line is None or not self._stopped_s or not (calls.standing.state == "inside" or self._main_thread_waits()):
            self._still.pop(peer, None)
            return None
        now = line, calls.name, calls.standing
        before, looks = self._still.get(peer, (None, 0))
        self._still[peer] = now, looks + 1 if before == now else 0
        seconds = self._still[peer][1] * _LOOK_EVERY_S
        if seconds < self._stopped_s:
            return None
        return (
            f"rank {peer} ({line.split('|')[1]}) has given no sign of life for {seconds:.0f} s, while rank {self._rank} waited "
            f"for it: was it stopped, or does its machine hang? ({_STOPPED_S} sets this limit)"
        )

    def _main_thread_waits(self) -> bool:
        """Whether it is in a backward or a collective, as far as Python can tell."""
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None:
            if frame.f_code.co_filename.endswith(_WAITING):
                return True
            frame = frame.f_back
        return False

    def _apart_from(self, calls: Calls, ranks: tuple[int, ...], fault: Any) -> str | None:
        """A fault between this rank and the next one, which lasts. Everybody has a next one, so every fault is found."""
        if len(ranks) == 1:
            return None
        peer_rank = ranks[(ranks.index(self._rank) + 1) % len(ranks)]
        peer = self._standing(calls, peer_rank)
        found: str | None = None if peer is None else fault(calls, peer_rank, peer)
        key = (calls.name, peer_rank, fault.__name__)
        if found is None:
            self._suspected.pop(key, None)
            return None
        since = self._suspected.setdefault(key, time.monotonic())
        return found if time.monotonic() - since > _GRACE_S else None

    def _wait_until_failed_everywhere(self, calls: Calls) -> None:
        """Before a rank goes on after a call that failed: if it failed only here, the job is ended meanwhile."""
        number = calls.standing.number
        waiting = [rank for rank in calls.tp_ranks if rank != self._rank]
        while waiting and self._goes_on():
            standings = {rank: self._standing(calls, rank) for rank in waiting}
            waiting = [rank for rank in waiting if not _has_left(standings[rank], number)]
            if waiting:
                time.sleep(0.1)

    # The store

    def _goes_on(self) -> bool:
        return self._world is dist.group.WORLD

    def _tell(self, calls: Calls) -> None:
        self._write(_where(calls, self._rank), calls.standing.written())

    def _standing(self, calls: Calls, rank: int) -> Standing | None:
        text = self._read(_where(calls, rank))
        return None if text is None else Standing.read(text)

    def _first_failure(self) -> str | None:
        if self._first is None:
            self._first = self._read(_FAILED)
        return self._first

    def _ended_without_error(self) -> str | None:
        return self._read(_ENDED)

    def _write(self, key: str, value: str) -> None:
        if not self._store_is_gone:
            with self._noticing_that_it_is_gone():
                self._store.set(key, value)

    def _read(self, key: str) -> str | None:
        if not self._store_is_gone:
            with self._noticing_that_it_is_gone():
                if self._store.check([key]):
                    return str(self._store.get(key).decode())
        return None

    @contextlib.contextmanager
    def _noticing_that_it_is_gone(self) -> Iterator[None]:
        """It goes with rank 0 where no launcher keeps it; each further use would fill the screen with stacks of C++."""
        try:
            yield
        except Exception:
            self._store_is_gone = True


def _alive(rank: int) -> str:
    return f"oslo_engine/alive/{rank}"


def _where(calls: Calls, rank: int) -> str:
    return f"oslo_engine/standing/{calls.name}/{rank}"


def _has_left(standing: Standing | None, number: int) -> bool:
    return standing is not None and (standing.number > number or (standing.number == number and standing.state == "failed"))


def _say(text: str) -> None:
    print(f"oslo_engine: {text}", file=sys.stderr, flush=True)
