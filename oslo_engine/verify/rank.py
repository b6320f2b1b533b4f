"""What one rank does: join the others, build the trial, run the checks, and tell every row as soon as it is known."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from oslo_engine.errors import OsloError
from oslo_engine.verify.checks import checks_of
from oslo_engine.verify.checks.check import Check
from oslo_engine.verify.report import Row
from oslo_engine.verify.task import Message, Task
from oslo_engine.verify.trial import Trial, build_trial, seed_everything

Send = Callable[[Message], None]


def run_rank(task: Task, rank: int, send: Send) -> None:
    """Run all checks; a row that could not be made is a failed one, and its error is raised."""
    threading.Thread(target=_die_with_parent, args=(task.folder,), daemon=True).start()
    with open(task.stack_file(rank), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        _quiet()
        _join(task, rank)
        try:
            trial = build_trial(task.subject, task.settings, task.tied, task.folder)
        except OsloError as error:
            send(Message(refused=error))
            return
        checks = checks_of(trial)
        send(Message(names=tuple(name for check in checks for name in check.rows)))
        for check in checks:
            _run(check, trial, send)


def _run(check: Check, trial: Trial, send: Send) -> None:
    waiting = list(check.rows)
    try:
        for row in check.results(trial):
            waiting.remove(row.name)
            send(Message(row=row))
        assert not waiting, f"no row for {waiting}"
    except BaseException as error:
        first_line = str(error).partition("\n")[0]
        send(
            Message(row=Row(waiting[0] if waiting else check.rows[-1], "fail", detail=f"{type(error).__name__}: {first_line}"))
        )
        raise


def _quiet() -> None:
    """What models say about odd sizes and missing tokens is of no interest here."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def _join(task: Task, rank: int) -> None:
    """A process group also for one rank: over gloo, models stay on the CPU."""
    torch.set_num_threads(1)
    seed_everything(task.settings.seed, rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    store = dist.FileStore(str(task.folder / "store"), task.settings.num_ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=task.settings.num_ranks, timeout=timedelta(seconds=task.timeout_s)
    )


def _die_with_parent(folder: Path) -> None:
    parent: Any = parent_process()
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
