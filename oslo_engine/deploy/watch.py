"""Notices workers that hang, and ends them: the dispatcher then sees them die, and needs to know of nothing else.

It is a thread of its own, because the dispatcher may itself be held up by a worker that does not read its pipe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oslo_engine.deploy.pulse import Pulse, ask_for_stacks, read_pulse
from oslo_engine.deploy.settings import Deployment
from oslo_engine.errors import WorkerHungError

_LOOK_S = 0.5


@dataclass(frozen=True)
class Verdict:
    """Workers that hang. ``rank``: the one that shows no life; None where all live and none goes on."""

    rank: int | None
    after_s: float


class Judge:
    """Decides from pulses that are looked at again and again.

    * A worker whose pulse stands still for ``silence_timeout_s`` is stopped or held up, whether calls run or not.
    * Where calls run on several workers and none of these has computed or communicated for ``stall_timeout_s``, they wait for
      one another for ever.

    Time counts only as far as this process itself was running: a machine that slept does not make its workers hang.
    """

    def __init__(self, num_ranks: int, settings: Deployment) -> None:
        self._settings = settings
        self._last = [Pulse()] * num_ranks
        self._silent_s = [0.0] * num_ranks
        self._stalled_s = 0.0

    def look(self, pulses: Sequence[Pulse], busy: bool, passed_s: float) -> Verdict | None:
        """Args:
        pulses: of all workers. busy: whether calls run. passed_s: since the last look.
        """
        passed_s = min(passed_s, 2 * _LOOK_S)
        moved = [now.beats != before.beats for now, before in zip(pulses, self._last, strict=True)]
        self._silent_s = [0.0 if one else silent + passed_s for one, silent in zip(moved, self._silent_s, strict=True)]
        went_on = any(now.progress != before.progress for now, before in zip(pulses, self._last, strict=True))
        self._stalled_s = 0.0 if went_on or not busy or len(pulses) == 1 else self._stalled_s + passed_s
        self._last = list(pulses)
        longest = max(self._silent_s)
        if longest >= self._settings.silence_timeout_s:
            return Verdict(self._silent_s.index(longest), self._settings.silence_timeout_s)
        if self._stalled_s >= self._settings.stall_timeout_s:
            return Verdict(None, self._settings.stall_timeout_s)
        return None


class Watch:
    """Args:
    processes: by rank; killed if one of them hangs.
    folder: where their pulses are.
    is_busy: whether calls run on them.

    Attributes:
        found: why they were killed.
    """

    def __init__(self, processes: Sequence[Any], folder: Path, settings: Deployment, is_busy: Callable[[], bool]) -> None:
        self._processes, self._folder, self._settings, self._is_busy = processes, folder, settings, is_busy
        self.found: WorkerHungError | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._life, daemon=True, name="oslo-watch").start()

    def end(self) -> None:
        self._ended.set()

    def _life(self) -> None:
        judge, before = Judge(len(self._processes), self._settings), time.monotonic()
        while not self._ended.wait(_LOOK_S):
            now = time.monotonic()
            pulses = [read_pulse(self._folder, rank) for rank in range(len(self._processes))]
            verdict = judge.look(pulses, self._is_busy(), now - before)
            before = now
            if verdict is not None:
                self.found = self._told(verdict, pulses)
                for process in self._processes:
                    process.kill()
                return

    def _told(self, verdict: Verdict, pulses: Sequence[Pulse]) -> WorkerHungError:
        counts = ", ".join(f"rank {rank}: {pulse.collectives}" for rank, pulse in enumerate(pulses))
        if verdict.rank is not None:
            error = WorkerHungError(
                "a worker does not run any more",
                where=f"rank {verdict.rank}, process {self._processes[verdict.rank].pid}",
                got=f"no sign of life for {verdict.after_s:g} s",
                hint="it was stopped by a signal or the machine is out of memory; the workers are ended and started anew",
            )
        else:
            error = WorkerHungError(
                "the workers wait for one another",
                where=f"all of {len(pulses)}",
                expected=f"some computing or communication within {verdict.after_s:g} s",
                got=f"none; collectives run: {counts}",
                hint="the notes say where they stand; Deployment(stall_timeout_s=...) where something may take so long",
            )
        for rank, stack in ask_for_stacks(self._folder, len(self._processes)).items():
            error.add_note(f"\nrank {rank} stands here:\n{stack}")
        return error
