"""A script started with a number of processes that does not fit: every launcher is done with it within ten seconds."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from patience import on_this_machine

SCRIPT = Path(__file__).parent.parent / "support" / "failing_ranks.py"
LIMIT_S = 10.0
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=3"],
    "deepspeed": ["deepspeed.launcher.runner", "--no_local_rank", "--num_gpus=3", "--master_port=29517"],
    "accelerate": [
        "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_machines=1", "--num_processes=3",
        "--mixed_precision=no", "--dynamo_backend=no",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_wrong_world_size_ends_every_rank_with_the_three_numbers(launcher: str) -> None:
    if launcher == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (make test-slow does it)")
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
    limit_s = on_this_machine(LIMIT_S)
    started = subprocess.Popen(
        [sys.executable, "-m", *LAUNCHERS[launcher], str(SCRIPT), "world", "2", "1"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout is not None
    said, wrong = "", {}
    for line in started.stdout:
        said += line
        if found := re.search(r"WRONG ([\d.]+) (\d+)", line):
            wrong[int(found[2])] = float(found[1])
        if len(wrong) == 3:
            break
    with ThreadPoolExecutor(1) as reader:
        rest = reader.submit(started.stdout.read)
        seconds = wait_until_ended(list(wrong)) - max(wrong.values())
        said += rest.result()
    print(f"{launcher}: the last rank ended {seconds:.1f} s after the last one came to parallelize")
    assert seconds < limit_s
    assert started.wait() != 0
    assert said.count("tp * pp must divide the world size") >= 3
    assert "tp=2, pp=1, world size=3" in said


def wait_until_ended(processes: list[int]) -> float:
    """The moment when none of them runs any more."""
    while any(is_running(pid) for pid in processes):
        time.sleep(0.05)
    return time.time()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
