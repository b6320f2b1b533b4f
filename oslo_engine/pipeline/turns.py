"""Several runs of one model that take turns on a rank, so that the stages of a pipeline compute at the same time.

Each run is a thread, of which only one at a time is running: it stops before every forward, and again before the end of it,
where all ranks of the pipeline meet. Which one goes on is decided by counting alone, so that it is the same on every rank. With
two groups on two stages:

    stage 0   forward A  forward B | end A, forward A | end B, forward B | ...
    stage 1              forward A | end A, forward B | end B, forward A | ...

A stage may begin as many forwards ahead of the oldest that has not ended as there are stages from it to the last.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

Point = Literal["forward", "end"]


class _Abandoned(BaseException):
    """Ends a run after another one has failed."""


class Run:
    """One run: a thread that goes on when it is told to.

    Attributes:
        at: where it stands; None once it has ended.
    """

    def __init__(self, job: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.at: Point | None = None
        self._may_go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._abandoned = False
        context, threads = contextvars.copy_context(), torch.get_num_threads()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def life() -> None:
            self._may_go.acquire()
            torch.set_num_threads(threads)  # is the thread's own
            if device is not None:
                torch.cuda.set_device(device)
            try:
                self.result = context.run(job)
            except BaseException as error:
                self.error = error
            self.at = None
            self._stands.release()

        self._thread = threading.Thread(target=life, daemon=True)
        self._thread.start()

    def stop_at(self, point: Point) -> None:
        """Called by the run itself."""
        self.at = point
        self._stands.release()
        self._may_go.acquire()
        if self._abandoned:
            raise _Abandoned

    def go_on(self, *, abandoned: bool = False) -> None:
        """Let it run up to where it stops next, or ends."""
        self._abandoned = abandoned
        self._may_go.release()
        self._stands.acquire()


class Turns:
    """Args:
    ahead: how many forwards this rank may have begun and not ended: the stages from its own to the last.
    num_stages: of the pipeline.
    """

    def __init__(self, ahead: int, num_stages: int) -> None:
        self._ahead, self._num_stages = ahead, num_stages
        self._current: Run | None = None

    def stop_at(self, point: Point) -> None:
        """Called where a forward begins and before it ends; the run that called goes on when it is its turn."""
        assert self._current is not None
        self._current.stop_at(point)

    def run_all(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of all jobs.

        Raises:
            BaseException: what the first of them raised; the others are abandoned, on every rank before the same forward.
        """
        runs = [Run(job) for job in jobs]
        ready, begun = deque(runs), deque[tuple[int, Run]]()
        num_forwards, last_forward = 0, None
        for run in runs:
            self._go_on(run)
        while ready or begun:
            while ready and len(begun) < self._ahead:
                run = ready.popleft()
                if run.at is None:
                    continue
                if last_forward is not None and num_forwards > last_forward:
                    self._go_on(run, abandoned=True)
                    continue
                self._go_on(run)
                begun.append((num_forwards, run))
                num_forwards += 1
            if begun:
                number, run = begun.popleft()
                if run.at == "end":
                    self._go_on(run)
                if run.error is not None and last_forward is None:
                    last_forward = number + self._num_stages - 1  # no stage is further ahead
                ready.append(run)
        failed = next((run for run in runs if run.error is not None and not isinstance(run.error, _Abandoned)), None)
        if failed is not None:
            assert failed.error is not None
            raise failed.error
        return [run.result for run in runs]

    def _go_on(self, run: Run, *, abandoned: bool = False) -> None:
        self._current = run
        run.go_on(abandoned=abandoned)
