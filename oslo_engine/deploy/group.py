"""The worker processes of a deployed model: starting them all or none, and ending them."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from oslo_engine.deploy.folder import SharedFolder, clear_left_behind
from oslo_engine.deploy.hidden_main import main_hidden
from oslo_engine.deploy.messages import Problem, Ready, Stop, Traits, pack, receive
from oslo_engine.deploy.settings import Deployment
from oslo_engine.deploy.watch import Watch
from oslo_engine.errors import CallCancelledError, DeploymentError, PipelineError, WorkerDied

# Imported once, in the process that the workers are forked from. It is a fresh one, without threads or a GPU in use.
_PRELOAD = [
    "torch.distributed.pipelining.schedules",
    "transformers.generation.utils",
    "oslo_engine.deploy.worker",
    "oslo_engine.deploy.forker",
]
_GRACE_S = 1.0  # after one worker has failed, the others may still say what they know
_STOP_S = 5.0
_KILL_S = 10.0  # a process that waits for a dead disk or driver does not even end then


@dataclass
class WorkerGroup:
    """Workers that are ready. ``traits``: of the model they hold. ``watch``: ends them when they hang."""

    processes: list[Any]
    pipes: list[Connection]
    folder: SharedFolder
    traits: Traits | None = None
    watch: Watch | None = None

    @classmethod
    def start(
        cls,
        load: bytes,
        num_ranks: int,
        settings: Deployment,
        given_up: Callable[[], bool],
        is_busy: Callable[[], bool],
    ) -> WorkerGroup:
        """Start the workers and wait until all have loaded the model.

        Args:
            load: packed, a function without arguments that returns the model; called on every rank.
            given_up: asked meanwhile; when it says so, the start is left.
            is_busy: whether calls run on the workers; asked later.

        Raises:
            Exception: what a worker raised, with its traceback.
            WorkerDied: a worker ended. DeploymentError: the time is up. No worker is left.
        """
        from oslo_engine.deploy.worker import Assignment, run_worker

        clear_left_behind()
        group = cls([], [], SharedFolder())
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        seed = random.SystemRandom().getrandbits(63)
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                assignment = Assignment(rank, num_ranks, group.folder.path, load, settings, seed)
                process = context.Process(target=run_worker, args=(assignment, theirs), daemon=True, name=f"rank {rank}")
                with main_hidden():
                    process.start()
                # At the end of any process that has this one in its list, a forked child of this one too, it would be ended.
                multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
                theirs.close()  # or the end of the worker would never be seen
                group.processes.append(process)
                group.pipes.append(ours)
            group.traits = group._wait_until_ready(settings.start_timeout_s, given_up)
            group.watch = Watch(group.processes, group.folder.path, settings, is_busy)
        except BaseException:
            group.kill()
            raise
        return group

    def _wait_until_ready(self, timeout_s: float, given_up: Callable[[], bool]) -> Traits:
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        traits: dict[int, Traits] = {}
        problems: dict[int, Problem] = {}
        died: dict[int, WorkerDied] = {}
        while waiting and (left_s := deadline - time.monotonic()) > 0 and not given_up():
            for pipe in wait(list(waiting), min(left_s, 0.2)):
                rank = waiting.pop(pipe)
                try:
                    message = receive(pipe)  # type: ignore[arg-type]
                except (EOFError, OSError):
                    died[rank] = self.death(rank, "while the workers were starting")
                else:
                    if isinstance(message, Ready):
                        traits[rank] = message.traits
                    else:
                        problems[rank] = message
                if died or problems:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if died:  # what others then met follows from it
            raise next(iter(died.values()))
        if problems:
            raise told(problems)
        if given_up():
            raise CallCancelledError("the model was closed while its workers were starting")
        if waiting:
            raise DeploymentError(
                "the workers did not load the model in time",
                where=f"rank {', '.join(map(str, sorted(waiting.values())))}",
                expected=f"within {timeout_s:g} s",
                hint="pass deployment=Deployment(start_timeout_s=...)",
            )
        return traits[0]

    def death(self, rank: int, when: str) -> WorkerDied:
        """The error for a worker whose pipe or process has ended; of several dead ones, that which died first is told."""
        if self.watch is not None and self.watch.found is not None:
            return self.watch.found
        process = self.processes[rank]
        process.join(1)
        code = process.exitcode
        signal = f" (signal {-code})" if code is not None and code < 0 else ""
        return WorkerDied(
            f"a worker died {when}",
            where=f"rank {rank}, process {process.pid}",
            got=f"exit code {code}{signal}",
            hint="signal 9 without anybody sending it means that the memory ran out; look at the messages it left on stderr",
        )

    def stop(self) -> None:
        """Let idle workers end by themselves; then as ``kill``."""
        for pipe in self.pipes:
            with suppress(OSError):
                pipe.send_bytes(pack(Stop()))
        deadline = time.monotonic() + _STOP_S
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        if self.watch is not None:
            self.watch.end()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(_KILL_S)
        for pipe in self.pipes:
            pipe.close()
        self.folder.remove()


def told(problems: dict[int, Problem]) -> BaseException:
    """The exception that went wrong first, as far as can be told, with the tracebacks of all ranks as notes.

    That is the lowest rank's that did not merely hear of another's failure.
    """
    errors = {rank: _unpacked(problem) for rank, problem in sorted(problems.items())}
    own = [error for error in errors.values() if not isinstance(error, PipelineError)]
    error = own[0] if own else next(iter(errors.values()))
    seen: set[str] = set()
    for rank in errors:
        if problems[rank].trace not in seen:
            error.add_note(f"\non rank {rank}:\n{problems[rank].trace}")
        seen.add(problems[rank].trace)
    return error


def _unpacked(problem: Problem) -> BaseException:
    try:
        error = pickle.loads(problem.error) if problem.error is not None else None
    except Exception:
        error = None
    return error if isinstance(error, Exception) else DeploymentError(problem.summary)
