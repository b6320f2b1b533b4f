"""Ranks that stay: processes with a gloo process group that run one test job after another.

A job is a function at the top level of a module; every rank calls it with the same arguments and its return value comes back:

    def sum_over_ranks(x):                       # in the test file itself, or in a module of tests/support
        dist.all_reduce(x)
        return x

    def test_sum(rank_pool):
        assert rank_pool(2).run(sum_over_ranks, torch.ones(1)) == [2.0, 2.0]

The ranks load the job's file by its path, so a test file need not be importable, and with pytest's rewritten asserts, so a
failing one shows its values. Arguments and results are pickled, tensors by value.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

# Imported once, in the process that the ranks are forked from.
PRELOAD = [
    "torch.distributed",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "pytest",
    __name__,
]


class RankFailure(AssertionError):
    """A job failed on some rank, or some rank gave no answer. The ranks have been killed; the next job starts new ones."""


@dataclass(frozen=True)
class _Answer:
    """What one rank said: its pickled return value, or the traceback of what it raised."""

    value: bytes = b""
    error: str = ""


class RankPool:
    """``world_size`` ranks that share a gloo process group; they start with the first job.

    Args:
        world_size: number of ranks.
        grace_s: how long the other ranks may go on after one has failed, since their tracebacks often tell more.
        start_timeout_s: how long starting the ranks may take; the time of the first job does not include it.
    """

    def __init__(self, world_size: int, *, grace_s: float = 2.0, start_timeout_s: float = 90) -> None:
        self.world_size, self.grace_s, self.start_timeout_s = world_size, grace_s, start_timeout_s
        self._ranks: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = Path()

    def run(self, job: Callable[..., Any], *args: Any, timeout_s: float = 60, **kwargs: Any) -> list[Any]:
        """Call ``job(*args, **kwargs)`` on every rank, each with torch, numpy and random seeded 0; the results by rank.

        Raises:
            RankFailure: with the traceback of every rank that raised, and where each silent rank stood.
            TypeError: the job is not a function at the top level of a module.
        """
        request = (*_address(job), pickle.dumps((args, kwargs)))
        try:
            if not self._ranks:
                self._start()
            for pipe in self._pipes:
                with suppress(BrokenPipeError, ConnectionResetError):  # a rank died meanwhile: seen as no answer
                    pipe.send(request)
            return [pickle.loads(answer.value) for answer in self._answers(job.__qualname__, timeout_s)]
        except BaseException:  # an interrupt too: the ranks are in the middle of something
            self.kill()
            raise

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes = [], []
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, theirs, self._folder), daemon=True)
            process.start()
            theirs.close()  # or its end would never be seen
            self._ranks.append(process)
            self._pipes.append(ours)
        self._answers("starting", self.start_timeout_s)

    def _answers(self, what: str, timeout_s: float) -> list[_Answer]:
        answers = self._collect(time.monotonic() + timeout_s)
        failed = [rank for rank in range(self.world_size) if rank not in answers or answers[rank].error]
        if failed:
            raise RankFailure(self._report(what, failed, answers, timeout_s))
        return [answers[rank] for rank in range(self.world_size)]

    def _collect(self, deadline: float) -> dict[int, _Answer]:
        """Answers by rank, until all are there, the time is up, or ``grace_s`` after the first failure."""
        answers: dict[int, _Answer] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left_s):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._ranks[rank].join(1)
                    answers[rank] = _Answer(error=f"died with exit code {self._ranks[rank].exitcode}\n")
                if answers[rank].error:
                    deadline = min(deadline, time.monotonic() + self.grace_s)
        return answers

    def _report(self, what: str, failed: list[int], answers: dict[int, _Answer], timeout_s: float) -> str:
        silent = [rank for rank in failed if rank not in answers]
        lines = [f"{what} failed on ranks {[rank for rank in failed if rank in answers]} of {self.world_size}"]
        if silent:
            waited = f"in {timeout_s} s" if len(silent) == len(failed) else f"within {self.grace_s} s of the first failure"
            lines[0] += f"; no answer from ranks {silent} {waited}"
        stacks = self._stacks(silent)
        for rank in failed:
            lines.append(f"--- rank {rank}: {answers[rank].error if rank in answers else stacks[rank]}")
        return "\n".join(lines)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where ranks stand that do not answer. Those that are not up yet end by the signal, which is as well."""
        for rank in ranks:
            if self._ranks[rank].is_alive():
                os.kill(self._ranks[rank].pid, signal.SIGUSR1)  # see _serve
        files = {rank: _stack_file(self._folder, rank) for rank in ranks}
        deadline, before, now = time.monotonic() + 2, [-1], [0]
        while time.monotonic() < deadline and not (all(now) and now == before):  # they are written line by line
            time.sleep(0.1)
            before, now = now, [file.stat().st_size if file.exists() else 0 for file in files.values()]
        return {rank: f"silent, at\n{file.read_text()}" if file.exists() else "silent" for rank, file in files.items()}


def _address(job: Callable[..., Any]) -> tuple[str, str, str]:
    """Where the ranks find a job: file, name of the module, name in the module."""
    module, name = sys.modules.get(job.__module__), job.__qualname__
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        found = None
    if found is not job or not getattr(module, "__file__", None):
        raise TypeError(f"a job must be a function at the top level of a module, got {job.__module__}.{name}")
    return str(module.__file__), job.__module__, name


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


# What follows runs in the ranks.


def _serve(rank: int, world_size: int, pipe: Connection, folder: Path) -> None:
    import faulthandler

    import torch
    import torch.distributed as dist

    threading.Thread(target=_die_with_parent, args=(folder,), daemon=True).start()
    torch.set_num_threads(1)
    with open(_stack_file(folder, rank), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(folder / "store"), world_size), rank=rank, world_size=world_size
        )
        pipe.send(_Answer())
        while True:
            try:
                request = pipe.recv()
            except EOFError:
                os._exit(0)
            pipe.send(_answer(*request))


def _die_with_parent(folder: Path) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _answer(file: str, module: str, name: str, payload: bytes) -> _Answer:
    import numpy
    import torch

    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    try:
        job = attrgetter(name)(_load(file, module))  # before the arguments: their types may be defined there
        args, kwargs = pickle.loads(payload)
        return _Answer(value=pickle.dumps(job(*args, **kwargs)))
    except BaseException as error:
        frames = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)  # without this function's own
        return _Answer(error="".join(traceback.format_exception(type(error), error, frames)))


def _load(file: str, name: str) -> ModuleType:
    """The module in a file, under the name that it has in the tests, with rewritten asserts."""
    from _pytest.assertion.rewrite import rewrite_asserts

    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == file:
        return loaded
    parents = name.split(".")[:-1]
    for package in (".".join(parents[:length]) for length in range(1, len(parents) + 1)):
        try:
            import_module(package)
        except ModuleNotFoundError:  # pytest names test files by their folders, which are no packages
            sys.modules[package] = ModuleType(package)
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    rewrite_asserts(tree, source, file)
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    try:
        exec(compile(tree, file, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
