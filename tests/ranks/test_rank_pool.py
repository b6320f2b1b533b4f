"""The pool itself: results, and what it does when a rank fails, hangs or dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rank_pool import RankFailure, RankPool


@dataclass(frozen=True)
class Pair:
    rank: int
    total: torch.Tensor


def sum_over_ranks(x: torch.Tensor) -> Pair:
    total = x * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return Pair(dist.get_rank(), total)


def draw() -> float:
    return torch.rand(1).item()


def own_pid() -> int:
    return os.getpid()


def echo(pair: Pair, *, times: int) -> list[Pair]:
    return [pair] * times


def fail_on_rank_one() -> None:
    expected = 41
    if dist.get_rank() == 1:
        assert expected == 42
    dist.barrier()  # where the other rank waits for ever


def fail_everywhere() -> None:
    raise ValueError(f"rank {dist.get_rank()} was here")


def hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def return_a_lambda() -> object:
    return lambda: None


@pytest.fixture
def pool() -> Iterator[RankPool]:
    """Of its own, for tests that kill it."""
    pool = RankPool(2)
    yield pool
    pool.kill()


def test_each_rank_returns_its_result_in_the_order_of_ranks(rank_pool) -> None:
    results = rank_pool(2).run(sum_over_ranks, torch.tensor([1.0, 10.0]))
    assert [result.rank for result in results] == [0, 1]
    assert all(torch.equal(result.total, torch.tensor([3.0, 30.0])) for result in results)


def test_arguments_of_types_from_the_test_file_arrive(rank_pool) -> None:
    pair = Pair(7, torch.ones(2))
    assert [[p.rank for p in pairs] for pairs in rank_pool(2).run(echo, pair, times=3)] == [[7, 7, 7]] * 2


def test_every_job_starts_from_the_same_seed(rank_pool) -> None:
    first, second = rank_pool(2).run(draw), rank_pool(2).run(draw)
    assert first == second
    assert first[0] == first[1]


def test_ranks_stay_between_jobs(rank_pool) -> None:
    assert rank_pool(2).run(own_pid) == rank_pool(2).run(own_pid)


def test_other_world_sizes_get_pools_of_their_own(rank_pool) -> None:
    assert len(set(rank_pool(3).run(own_pid)) | set(rank_pool(2).run(own_pid))) == 5


def test_failure_names_the_rank_shows_the_values_and_where_the_others_stand(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool.run(fail_on_rank_one)
    message = str(caught.value)
    assert message.startswith("fail_on_rank_one failed on ranks [1] of 2")
    assert "assert 41 == 42" in message
    assert "rank 0" in message
    assert "barrier" in message


def test_failure_on_all_ranks_shows_every_traceback(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 was here.*rank 1 was here") as caught:
        pool.run(fail_everywhere)
    assert "silent" not in str(caught.value)


def test_hang_ends_at_the_timeout_and_shows_where_the_silent_rank_stands(pool: RankPool) -> None:
    pool.run(draw)
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)no answer from ranks \[0\] in 3 s.*in hang_on_rank_zero"):
        pool.run(hang_on_rank_zero, timeout_s=3)
    assert time.monotonic() - started < 20


def test_ranks_that_do_not_start_are_reported() -> None:
    pool = RankPool(2, start_timeout_s=0.01)
    with pytest.raises(RankFailure, match=r"starting failed .* no answer from ranks \[0, 1\]"):
        pool.run(draw)


def test_dead_rank_is_reported_with_its_exit_code(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 1: died with exit code 7"):
        pool.run(die_on_rank_one)


def test_rank_that_died_between_jobs_is_reported_with_the_next(pool: RankPool) -> None:
    os.kill(pool.run(own_pid)[1], signal.SIGKILL)
    with pytest.raises(RankFailure, match="rank 1: died with exit code -9"):
        pool.run(draw)


def test_result_that_cannot_be_sent_is_a_failure_of_the_rank(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="return_a_lambda"):
        pool.run(return_a_lambda)


def test_pool_starts_again_after_a_failure(pool: RankPool) -> None:
    before = pool.run(own_pid)
    with pytest.raises(RankFailure):
        pool.run(fail_everywhere)
    after = pool.run(own_pid)
    assert not set(before) & set(after)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_job_inside_a_function_is_refused_before_anything_starts(pool: RankPool) -> None:
    def inside() -> None: ...

    with pytest.raises(TypeError, match="top level of a module"):
        pool.run(inside)
    with pytest.raises(TypeError, match="top level of a module"):
        pool.run(lambda: None)


SCRIPT = """
import sys
from rank_pool import RankPool
from sleeper import sleep_and_tell
if __name__ == "__main__":
    RankPool(2).run(sleep_and_tell, sys.argv[1])
"""
JOB = """
import os, pathlib, time
def sleep_and_tell(folder):
    pathlib.Path(folder, f"pid-{os.getpid()}").touch()
    time.sleep(600)
"""


def test_ranks_and_their_files_do_not_outlive_a_killed_parent() -> None:
    with tempfile.TemporaryDirectory() as name:  # short, since a socket is put there
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        (folder / "sleeper.py").write_text(JOB)
        environment = {**os.environ, "PYTHONPATH": str(Path(sys.modules["rank_pool"].__file__).parent), "TMPDIR": name}
        parent = subprocess.Popen([sys.executable, str(folder / "script.py"), name], env=environment)
        try:
            _wait_until(lambda: len(list(folder.glob("pid-*"))) == 2, 60)
        finally:
            parent.kill()
            parent.wait()
        pids = [int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")]
        _wait_until(lambda: not any(_is_running(pid) for pid in pids), 10)
        assert list(folder.glob("ranks-*")) == []


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
