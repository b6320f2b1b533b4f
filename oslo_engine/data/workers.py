"""Processes that encode units; their results come back in the order of the units.

Workers are started as plain interpreters that import only what encoding needs: they are small, and do not run the caller's
script again. A worker whose parent is gone reads the end of its pipe and ends.

Only the worker whose unit is next is sure to be heard; of the others a few megabytes are kept, then they wait. So memory is
bounded, whatever a unit becomes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from oslo_engine.data.encoding import EncodingPlan, UnitEncoder
from oslo_engine.data.fast_bpe import FastPathDiffersError
from oslo_engine.data.units import Result, Unit
from oslo_engine.errors import DataError, OsloError

_KEPT_BYTES = 1 << 23  # of results of one worker that wait for their turn


def encode_units(units: Iterator[Unit], plan: EncodingPlan, num_workers: int) -> Iterator[tuple[Unit, Result]]:
    """The results of all units in order, each with its unit; computed in this process if ``num_workers`` is 0.

    Raises:
        DataError: a worker died.
        FastPathDiffersError: from any worker.
    """
    if num_workers == 0:
        encoder = UnitEncoder(plan)
        for unit in units:
            for result in encoder.encode(unit):
                yield unit, result
        return
    workers = [_Worker(plan) for _ in range(num_workers)]
    try:
        yield from _in_order(units, workers)
    finally:
        for worker in workers:
            worker.stop()


def _in_order(units: Iterator[Unit], workers: list[_Worker]) -> Iterator[tuple[Unit, Result]]:
    busy: deque[_Worker] = deque()  # in the order of their units
    idle = list(workers)
    exhausted = False
    while True:
        while idle and not exhausted:
            unit = next(units, None)
            if unit is None:
                exhausted = True
            else:
                worker = idle.pop()
                worker.give(unit)
                busy.append(worker)
        if not busy:
            return
        first = busy[0]
        while first.results:
            result = first.next_result()
            assert first.unit is not None
            yield first.unit, result
            if result.last:
                idle.append(busy.popleft())
                break
        else:
            heard = [worker for worker in busy if not worker.finished and (worker is first or worker.kept < _KEPT_BYTES)]
            ready = wait([worker.connection for worker in heard])
            for worker in heard:
                if worker.connection in ready:
                    worker.hear()


class _Worker:
    def __init__(self, plan: EncodingPlan) -> None:
        self.connection, theirs = Pipe()
        code = f"import sys; sys.path[:] = {sys.path!r}; from oslo_engine.data.workers import serve; serve({theirs.fileno()})"
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.unit: Unit | None = None
        self.results: deque[tuple[Result, int]] = deque()
        self.kept = 0
        self.finished = False
        self._send(plan)

    def give(self, unit: Unit) -> None:
        self.unit, self.finished = unit, False
        self._send(unit)

    def hear(self) -> None:
        """Take in what the worker has sent.

        Raises:
            What the worker raised.
        """
        try:
            message = self.connection.recv_bytes()
        except (EOFError, ConnectionError):
            self._died()
        result = pickle.loads(message)
        if isinstance(result, BaseException):
            raise result
        self.results.append((result, len(message)))
        self.kept += len(message)
        self.finished = result.last

    def next_result(self) -> Result:
        result, size = self.results.popleft()
        self.kept -= size
        return result

    def stop(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.wait()

    def _send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionError):
            self._died()

    def _died(self) -> NoReturn:
        code = self._process.wait()
        raise DataError(
            "a worker died",
            got=f"exit code {code}",
            where=str(getattr(self.unit, "path", None) or getattr(self.unit, "where", "start")),
            hint="it was killed, perhaps for want of memory: take fewer workers; what is done is kept, the same call goes on",
        ) from None


def serve(descriptor: int) -> None:
    """What a worker does: units in, results out, until the pipe is closed."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        plan = connection.recv()
        encoder: UnitEncoder | None = None
        while True:
            unit = connection.recv()
            try:
                encoder = encoder or UnitEncoder(plan)
                for result in encoder.encode(unit):
                    connection.send(result)
            except (ConnectionError, KeyboardInterrupt):
                raise
            except (OsloError, FastPathDiffersError) as error:
                connection.send(error)
            except BaseException:
                connection.send(DataError("a worker failed", where=str(getattr(unit, "path", "")), got=traceback.format_exc()))
