"""One thread that hands calls to the workers, and notices when one of them dies.

It waits in one place for everything that can happen: a new call, a cancellation, an answer, the end of a worker. Calls run one
after the other, those with the same key together. After a death the calls in flight fail at once, new workers are started, and
the calls that were only waiting run on those.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from oslo_engine.deploy.calls import Call
from oslo_engine.deploy.group import WorkerGroup, told
from oslo_engine.deploy.messages import Cancel, Problem, Result, RunMethod, RunPrompts, Tokens, Traits, pack, receive
from oslo_engine.deploy.settings import Deployment
from oslo_engine.errors import CallCancelledError, DeploymentError, QueueFullError

StartGroup = Callable[[Callable[[], bool], Callable[[], bool]], WorkerGroup]

_GRACE_S = 0.5  # after one worker has failed in a call, the others may be about to
_CLOSE_S = 10.0
_WINDOWS = 4  # in which calls keep coming, that the first of them waits


class Dispatcher:
    """Args:
    start_group: starts workers; asked now, and after a death. It is given two functions: the first says whether to leave the
        start, the second whether calls run on the workers.

    Raises:
        Exception: of the first start.

    Attributes:
        traits: of the model.
        restarts: how often workers were started anew.
    """

    def __init__(self, start_group: StartGroup, settings: Deployment) -> None:
        self._start_group, self._settings = start_group, settings
        self._lock = threading.Lock()
        self._waiting: deque[Call] = deque()
        self._running: list[Call] = []
        self._to_cancel: list[Call] = []
        self._closing = False
        self._failed_start: BaseException | None = None
        self.restarts = 0
        self._group: WorkerGroup | None = start_group(lambda: False, self._is_busy)
        assert self._group.traits is not None
        self.traits: Traits = self._group.traits
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._loop, daemon=True, name="oslo-dispatcher")
        self._thread.start()

    # From any thread

    def submit(self, call: Call) -> None:
        """Raises QueueFullError, or DeploymentError once closed."""
        with self._lock:
            if self._closing:
                raise DeploymentError("this model was closed", hint="load it again")
            if len(self._waiting) >= self._settings.max_queue:
                raise QueueFullError(
                    "too many calls wait for this model",
                    expected=f"at most {self._settings.max_queue}",
                    hint="try again later; Deployment(max_queue=...) sets the limit",
                )
            self._waiting.append(call)
        self._wake()

    def cancel(self, call: Call) -> None:
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
            elif call in self._running:
                self._to_cancel.append(call)
                self._wake()
                return
            else:
                return
        _fail(call, CallCancelledError("the call was cancelled"))

    def close(self) -> None:
        """Fail what waits and what runs, and end the workers."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive() and (group := self._group) is not None:
                group.kill()  # it is held up by a worker that does not read

    @property
    def state(self) -> str:
        if self._closing:
            return "closed"
        if self._group is not None:
            return "ready"
        return "failed" if self._failed_start is not None else "starting"

    def _is_busy(self) -> bool:
        return bool(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def pids(self) -> tuple[int, ...]:
        group = self._group
        return () if group is None else tuple(process.pid for process in group.processes)

    def _wake(self) -> None:
        with suppress(OSError):  # full, so it wakes anyway; or closed
            os.write(self._wake_write, b".")

    # The thread

    def _loop(self) -> None:
        try:
            while not self._closing:
                if self._group is None and not self._restart():
                    continue
                if not self._waiting:  # calls that waited through a restart tell nobody again
                    self._wait_for_something(self._pipes())
                while not self._closing and self._group is not None and (calls := self._next_calls()):
                    self._execute(calls)
        finally:
            self._end()

    def _pipes(self) -> list[Any]:
        return [] if self._group is None else list(self._group.pipes)

    def _wait_for_something(self, pipes: list[Any], timeout_s: float | None = None) -> list[Any]:
        """The pipes that have something to read. Idle workers say nothing: theirs then means an end."""
        ready = wait([self._wake_read, *pipes], timeout_s)
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
            ready.remove(self._wake_read)
        if ready and not self._running:
            self._bury(self._rank_of(ready[0]), "while nothing ran on it")
            return []
        return ready

    def _rank_of(self, pipe: Any) -> int:
        assert self._group is not None
        return self._group.pipes.index(pipe)

    def _next_calls(self) -> list[Call]:
        """The next call, and those that wait and may run together with it."""
        with self._lock:
            first = self._waiting[0] if self._waiting else None
        if first is None:
            return []
        window_s = self._settings.batch_window_ms / 1000
        while first.key is not None and not self._closing:
            with self._lock:
                together = [call for call in self._waiting if call.key == first.key]
            last = max((call.created for call in together), default=0.0)
            left_s = min(last + window_s, first.created + _WINDOWS * window_s) - time.monotonic()
            if left_s <= 0 or sum(call.rows for call in together) >= self._settings.max_batch_rows:
                break
            self._wait_for_something(self._pipes(), left_s)
            if self._group is None:
                return []
        with self._lock:
            if not self._waiting:
                return []
            chosen = [self._waiting.popleft()]
            rows, key = chosen[0].rows, chosen[0].key
            for call in [] if key is None else list(self._waiting):
                if call.key == key and rows + call.rows <= self._settings.max_batch_rows:
                    self._waiting.remove(call)
                    chosen.append(call)
                    rows += call.rows
            self._running = chosen
            return chosen

    def _execute(self, calls: list[Call]) -> None:
        assert self._group is not None
        first = calls[0]
        try:
            if first.prompt is None:
                work = pack(RunMethod(first.number, first.method, first.args, first.kwargs, first.seed, first.defaults))
            else:
                prompts = tuple(call.prompt for call in calls if call.prompt is not None)
                work = pack(RunPrompts(first.number, prompts, first.kwargs, first.seed, first.defaults))
        except Exception as error:
            self._fail_running(_unsendable(error))
            return
        for rank, pipe in enumerate(self._group.pipes):
            try:
                pipe.send_bytes(work)
            except OSError:
                self._bury(rank, f"when {first.method} was called")
                return
        self._collect(calls)

    def _collect(self, calls: list[Call]) -> None:
        """Wait for the answers of all workers to the running calls."""
        assert self._group is not None
        answers: dict[int, Result | Problem] = {}
        deadline: float | None = None
        while len(answers) < len(self._group.pipes):
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left_s == 0.0 or self._closing:
                break
            silent = [pipe for rank, pipe in enumerate(self._group.pipes) if rank not in answers]
            for pipe in self._wait_for_something(silent, left_s):
                rank = self._rank_of(pipe)
                try:
                    message = receive(pipe)
                except (EOFError, OSError):
                    self._bury(rank, f"during {calls[0].method}")
                    return
                if isinstance(message, Tokens):
                    _hand_out(message, calls)
                    continue
                answers[rank] = message
                if isinstance(message, Problem) and deadline is None:
                    deadline = time.monotonic() + _GRACE_S
            self._pass_on_cancellations(calls)
        if not self._closing:
            self._conclude(calls, answers)

    def _pass_on_cancellations(self, calls: list[Call]) -> None:
        with self._lock:
            asked, self._to_cancel = self._to_cancel, []
        for call in asked:
            if call in calls:
                _fail(call, CallCancelledError("the call was cancelled"))
                if call.prompt is not None and self._group is not None:
                    with suppress(OSError):  # its end is noticed where answers are read
                        self._group.pipes[0].send_bytes(pack(Cancel(calls[0].number, calls.index(call))))

    def _conclude(self, calls: list[Call], answers: dict[int, Result | Problem]) -> None:
        assert self._group is not None
        problems = {rank: answer for rank, answer in answers.items() if isinstance(answer, Problem)}
        if not problems:
            first = answers[0]
            assert isinstance(first, Result)
            assert first.value is not None
            value = pickle.loads(first.value)
            values = value if calls[0].prompt is not None else [value]
            for call, result in zip(self._take_running(), values, strict=True):
                _succeed(call, result)
            return
        together = len(answers) == len(self._group.pipes) and _in_step(list(answers.values()))
        error = told(problems)
        if not together:
            error.add_note("The workers were not in step any more and are started anew.")
        self._fail_running(error)
        if not together:
            self._lose_group()

    def _bury(self, rank: int, when: str) -> None:
        """A worker has died: fail what runs, and end the others."""
        assert self._group is not None
        dead = [number for number, process in enumerate(self._group.processes) if process.exitcode is not None]
        error = self._group.death(rank if rank in dead or not dead else dead[0], when)
        self._fail_running(error)
        self._lose_group()

    def _take_running(self) -> list[Call]:
        with self._lock:
            calls, self._running, self._to_cancel = self._running, [], []
        return calls

    def _fail_running(self, error: BaseException) -> None:
        for call in self._take_running():
            _fail(call, error)

    def _lose_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.kill()

    def _restart(self) -> bool:
        """Start new workers. After a start that failed, only once there is a call again."""
        if self._failed_start is not None:
            self._wait_for_something([])
            if not self._waiting:
                return False
        self._failed_start = None
        try:
            group = self._start_group(lambda: self._closing, self._is_busy)
        except BaseException as error:
            self._failed_start = error
            self._fail_waiting(error)
            return False
        self._group = group
        self.restarts += 1
        return True

    def _fail_waiting(self, error: BaseException) -> None:
        with self._lock:
            calls = list(self._waiting)
            self._waiting.clear()
        for call in calls:
            _fail(call, error)

    def _end(self) -> None:
        with self._lock:
            self._closing = True
        closed = DeploymentError("the model was closed before the call had a result")
        busy = bool(self._running)
        self._fail_running(closed)
        self._fail_waiting(closed)
        group, self._group = self._group, None
        if group is not None:
            (group.kill if busy else group.stop)()


def _in_step(answers: list[Result | Problem]) -> bool:
    """Whether all members of every process group have run as many collectives in it."""
    counts: dict[str, set[int]] = {}
    for answer in answers:
        for group, count in answer.sequence:
            counts.setdefault(group, set()).add(count)
    return all(len(found) == 1 for found in counts.values())


def _unsendable(error: Exception) -> DeploymentError:
    return DeploymentError(
        "the arguments of a call cannot be sent to the workers",
        got=str(error),
        hint="what is passed must be defined in a module that can be imported, not in the script itself",
    )


def _hand_out(message: Tokens, calls: list[Call]) -> None:
    for index, token in message.tokens:
        on_token = calls[index].on_token
        if on_token is not None and not calls[index].future.done():
            on_token(token)


def _succeed(call: Call, value: Any) -> None:
    if not call.future.done():
        call.future.set_result(value)


def _fail(call: Call, error: BaseException) -> None:
    if not call.future.done():
        call.future.set_exception(error)
