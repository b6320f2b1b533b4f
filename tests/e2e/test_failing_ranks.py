"""One rank goes wrong: the other ends within seconds and says why, without a launcher that would end it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent.parent / "support"


def start(how: str, rank: int, port: int) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "failing_ranks.py"), how],
        env={**os.environ, **place, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raises", "ValueError: no more of this"),
        pytest.param("hangs on", "ValueError: no more of this", marks=pytest.mark.slow),
        pytest.param("killed", "Connection", marks=pytest.mark.slow),
        pytest.param("ends", "rank 1 had ended before, without an error", marks=pytest.mark.slow),
    ],
)
def test_the_other_rank_ends_with_the_cause(how: str, cause: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = (start(how, rank, port) for rank in range(2))
    try:
        said = second.stdout
        assert said is not None
        wrong = next(line for line in said if line.startswith("WRONG"))
        _, complaint = first.communicate(timeout=10 - (time.time() - float(wrong.split()[1])) + 2)
    finally:
        first.kill()
        second.kill()
        first.wait()
        second.wait()
    assert first.returncode != 0
    assert cause in complaint
