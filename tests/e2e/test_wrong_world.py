"""A script started with a number of processes that does not fit: every launcher is done with it within ten seconds."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    done = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], str(SCRIPT), "world", "2", "1"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    ended = time.time()
    wrong = [float(moment) for moment in re.findall(r"WRONG ([\d.]+)", done.stdout)]
    assert len(wrong) == 3
    print(f"{launcher}: ended {ended - max(wrong):.1f} s after the last rank came to parallelize")
    assert done.returncode != 0
    assert ended - max(wrong) < LIMIT_S
    assert done.stdout.count("tp * pp must divide the world size") >= 3
    assert "tp=2, pp=1, world size=3" in done.stdout
