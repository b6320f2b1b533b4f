"""Starting the ranks on this machine, listening to them, and ending them, whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from oslo_engine.deploy.hidden_main import main_hidden
from oslo_engine.errors import OsloError
from oslo_engine.verify.report import Row
from oslo_engine.verify.task import Message, Task

# Imported once, in the process that the ranks are forked from.
_PRELOAD = ["torch.distributed.pipelining.schedules", "transformers.generation.utils", "oslo_engine.verify.rank"]
# After one rank has failed, the others may still say what they know: their errors often tell more.
_GRACE_S = 3.0


@dataclass
class Outcome:
    """What the ranks said.

    names: of all rows, in order. rows: by name and rank. errors: by rank.
    refused: why the model cannot be split this way. done: the ranks that have finished.
    """

    names: tuple[str, ...] = ()
    rows: dict[str, dict[int, Row]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    refused: OsloError | None = None
    done: set[int] = field(default_factory=set)

    def take(self, rank: int, message: Message) -> None:
        self.names = self.names or message.names
        self.refused = self.refused or message.refused
        if message.row is not None:
            self.rows.setdefault(message.row.name, {})[rank] = message.row
        if message.error:
            self.errors[rank] = message.error
        if message.done:
            self.done.add(rank)


def run_ranks(make_task: Callable[[Path], Task], num_ranks: int, timeout_s: float) -> Outcome:
    """Run the task on every rank until all are done, one has failed, or the time is up.

    Args:
        make_task: gets the folder that the ranks share; it is removed at the end.
    """
    folder = Path(tempfile.mkdtemp(prefix="oslo-verify-"))
    ranks: list[Any] = []
    pipes: list[Connection] = []
    task = make_task(folder)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    try:
        for rank in range(num_ranks):
            process, pipe = _start(task, rank)
            ranks.append(process)
            pipes.append(pipe)
        outcome = _listen(ranks, pipes, time.monotonic() + timeout_s)
        if silent := [rank for rank in range(num_ranks) if rank not in outcome.done]:
            outcome.errors |= _stacks(task, ranks, silent, timed_out=not outcome.errors)
        return outcome
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
        for pipe in pipes:
            pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def _start(task: Task, rank: int) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_task, args=(task, rank, theirs), daemon=True, name=f"rank {rank}")
    with main_hidden():
        process.start()
    theirs.close()  # or the end of the rank would never be seen
    return process, ours


def _listen(ranks: list[Any], pipes: list[Connection], deadline: float) -> Outcome:
    outcome = Outcome()
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left_s):
            rank = waiting[pipe]
            try:
                message: Message = pipe.recv()  # type: ignore
            except (EOFError, ConnectionResetError):
                ranks[rank].join(1)
                message = Message(error=f"died with exit code {ranks[rank].exitcode}", done=True)
            outcome.take(rank, message)
            if message.done:
                del waiting[pipe]
            if outcome.errors or outcome.refused:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return outcome


def _stacks(task: Task, ranks: list[Any], silent: list[int], *, timed_out: bool) -> dict[int, str]:
    """Where the ranks stand that have not finished."""
    for rank in silent:
        os.kill(ranks[rank].pid, signal.SIGUSR1)  # see rank.py
    deadline = time.monotonic() + 2
    files = {rank: task.stack_file(rank) for rank in silent}
    while time.monotonic() < deadline and not all(file.exists() and file.stat().st_size for file in files.values()):
        time.sleep(0.05)
    what = f"no result within {task.timeout_s:g} s" if timed_out else "still waiting when another rank had failed"
    return {rank: f"{what}, at\n{file.read_text() if file.exists() else '(not started)'}" for rank, file in files.items()}


# What follows runs in the ranks.


def _run_task(task: Task, rank: int, pipe: Connection) -> None:
    """The whole life of a rank's process: whatever happens in it, the parent hears."""
    try:
        from oslo_engine.verify.rank import run_rank

        run_rank(task, rank, pipe.send)
    except OsloError as error:
        pipe.send(Message(error=f"{type(error).__name__}: {error}"))
    except BaseException:
        pipe.send(Message(error=traceback.format_exc()))
    pipe.send(Message(done=True))
    pipe.close()
    os._exit(0)  # the others may be anywhere: no farewell to the process group
