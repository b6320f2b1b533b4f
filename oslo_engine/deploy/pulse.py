"""The pulse of a worker: a few numbers in a file, which the parent can read without asking.

A worker that is stopped, or whose interpreter is held up, cannot answer a question; one that waits for another in the middle
of a collective could, but would say that all is well. So a thread of the worker writes down, four times a second, that it lives
and how far the worker has come. An idle worker is watched as well as a busy one, and no message travels for it.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BEAT_S = 0.25
_FORMAT = struct.Struct("<QQQ")


@dataclass(frozen=True)
class Pulse:
    """beats: grows while the worker's threads can run. collectives: run so far. cpu_cs: hundredths of a second computed so far,
    0 where a GPU computes, since waiting for one may spin.
    """

    beats: int = 0
    collectives: int = 0
    cpu_cs: int = 0

    @property
    def progress(self) -> tuple[int, int]:
        return self.collectives, self.cpu_cs


def read_pulse(folder: Path, rank: int) -> Pulse:
    """The last that a worker wrote; zeros before its first."""
    try:
        content = _pulse_file(folder, rank).read_bytes()
    except OSError:
        content = b""
    return Pulse(*_FORMAT.unpack(content)) if len(content) == _FORMAT.size else Pulse()


def write_pulse(
    folder: Path, rank: int, collectives: Callable[[], int], *, counts_cpu: bool, goes_on: Callable[[], bool]
) -> None:
    """The life of the worker's thread.

    Args:
        collectives: how many were run so far, in all groups.
        counts_cpu: whether CPU time shows that the worker computes.
        goes_on: asked before each beat.
    """
    file = os.open(_pulse_file(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)
    beats, run, told = 0, 0, False
    while goes_on():
        beats += 1
        with suppress(Exception):  # a group is just being made
            run = collectives()
        cpu_s = _computed_s() if counts_cpu else 0.0
        os.pwrite(file, _FORMAT.pack(beats, run, int(cpu_s * 100)), 0)
        if not told and _question(folder).exists():
            told = True
            _stack_file(folder, rank).write_text(_stack())
        time.sleep(BEAT_S)


def _computed_s() -> float:
    """CPU seconds of the main thread, which runs the calls: others tick now and then."""
    main = threading.main_thread().ident
    if main is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time() - time.thread_time()
    return time.clock_gettime(time.pthread_getcpuclockid(main))


def ask_for_stacks(folder: Path, num_ranks: int) -> dict[int, str]:
    """Where the workers that still can run Python are, by rank, as text."""
    with suppress(OSError):  # the folder goes with the workers
        _question(folder).touch()
    time.sleep(3 * BEAT_S)
    found = {}
    for rank in range(num_ranks):
        try:
            found[rank] = _stack_file(folder, rank).read_text()
        except OSError:
            continue
    return found


def _stack() -> str:
    """Of the thread that runs the calls."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame))


def _pulse_file(folder: Path, rank: int) -> Path:
    return folder / f"pulse-{rank}"


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


def _question(folder: Path) -> Path:
    return folder / "where-are-you"
