"""One rank goes wrong: all the others end within ten seconds and say why, without a launcher that would end them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patience import on_this_machine

SUPPORT = Path(__file__).parent.parent / "support"
LIMIT_S = 10.0
STOPPED_S = 4
SLOW = pytest.mark.slow


def start(how: str, tp: int, pp: int, rank: int, port: int) -> subprocess.Popen[str]:
    limits = {"OSLO_ENGINE_STOPPED_S": str(STOPPED_S)} if how in ("stopped", "stopped in backward", "busy") else {}
    place = {"RANK": str(rank), "WORLD_SIZE": str(tp * pp), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "failing_ranks.py"), how, str(tp), str(pp)],
        env={**os.environ, **place, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **limits},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


NO_MORE = "rank 1: ValueError: no more of this"
CAUGHT = "ValueError: no more of this\n(caught there, while rank 0 waited for it)"
GONE = "ended without a word: killed by a signal"
CASES = [
    ("raises", 2, 1, NO_MORE),
    pytest.param("raises", 1, 2, NO_MORE, marks=SLOW),
    pytest.param("raises", 2, 2, NO_MORE, marks=SLOW),
    ("catches", 2, 1, CAUGHT),
    pytest.param("catches", 2, 2, "ValueError: no more of this", marks=SLOW),
    pytest.param("killed", 2, 1, GONE, marks=SLOW),
    pytest.param("killed", 1, 2, GONE, marks=SLOW),
    pytest.param("killed", 2, 2, GONE, marks=SLOW),
    ("stopped", 2, 1, "has given no sign of life for 4 s, while rank 0 waited for it"),
    pytest.param("stopped", 1, 2, "has given no sign of life for 4 s", marks=SLOW),
    pytest.param("stopped in backward", 2, 1, "has given no sign of life for 4 s", marks=SLOW),
    pytest.param("ends", 2, 1, "rank 1 had ended before, without an error", marks=SLOW),
    pytest.param("ends", 1, 2, "rank 1 had ended before, without an error", marks=SLOW),
    pytest.param("saves", 2, 1, "rank 0 is in a forward while rank 1 is in saving", marks=SLOW),
    pytest.param("saves", 1, 2, "rank 0 is in a training batch while rank 1 is in saving", marks=SLOW),
    pytest.param("evaluates", 2, 1, "rank 0 is in a forward while rank 1 is in a forward without gradients", marks=SLOW),
    pytest.param("nan", 2, 1, "FloatingPointError: the loss is nan", marks=SLOW),
    pytest.param("nan", 1, 2, "FloatingPointError: the loss is nan", marks=SLOW),
    pytest.param("nan gradient", 2, 2, "c_fc.weight", marks=SLOW),
]


@pytest.mark.timeout(300)  # to start; the limit is asserted
@pytest.mark.parametrize(("how", "tp", "pp", "cause"), CASES)
def test_all_the_others_end_within_ten_seconds_with_the_cause(how: str, tp: int, pp: int, cause: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limit_s = on_this_machine(LIMIT_S)
    ranks = [start(how, tp, pp, rank, port) for rank in range(tp * pp)]
    try:
        said = ranks[1].stdout
        assert said is not None
        wrong = float(next(line for line in said if line.startswith("WRONG")).split()[1])
        complaints = {}
        for rank in [rank for rank in range(tp * pp) if rank != 1]:
            _, complaints[rank] = ranks[rank].communicate(timeout=max(0.1, wrong + limit_s - time.time()))
            print(f"rank {rank} ended {time.time() - wrong:.1f} s after rank 1 went wrong")
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
    for rank, complaint in complaints.items():
        assert ranks[rank].returncode != 0
        assert cause in complaint, f"rank {rank} said:\n{complaint}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_computes_by_itself_for_long_is_waited_for() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start("busy", 2, 1, rank, port) for rank in range(2)]
    try:
        said = [each.communicate(timeout=250)[1] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0], said
