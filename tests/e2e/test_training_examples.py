"""The training examples, small, as people start them: each learns, and leaves a model that plain Transformers loads."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import deepspeed_op

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SLOW = pytest.mark.slow
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed (make test-slow does it)"
)
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node={ranks}"],
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus={ranks}", "--master_port=29513"],
    "accelerate": [
        "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_machines=1", "--num_processes={ranks}",
        "--mixed_precision=no", "--dynamo_backend=no",
    ],
}  # fmt: skip


def run(launcher: str, ranks: int, example: str, *arguments: str) -> str:
    command = [sys.executable, "-m", *(word.format(ranks=ranks) for word in LAUNCHERS[launcher])]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{example}.py"), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:loss |'loss': ')([\d.]+)", text)]


@pytest.mark.parametrize(
    ("launcher", "tp", "pp", "ranks"),
    [("torchrun", 1, 2, 2), pytest.param("torchrun", 2, 2, 4, marks=SLOW), pytest.param("accelerate", 2, 1, 4, marks=SLOW)],
)
@pytest.mark.timeout(700)
def test_gpt2_in_a_plain_loop(tmp_path: Path, launcher: str, tp: int, pp: int, ranks: int) -> None:
    said = run(launcher, ranks, "pretrain_gpt2", f"--tp={tp}", f"--pp={pp}", "--steps=8", f"--output={tmp_path}")
    found = losses(said)
    assert len(found) == 8
    assert found[-1] < found[0] - 1
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config.n_layer == 4


@pytest.mark.parametrize(("tp", "pp", "ranks"), [(2, 1, 2), pytest.param(2, 2, 4, marks=SLOW)])
@pytest.mark.timeout(700)
def test_t5_with_the_trainer(tmp_path: Path, tp: int, pp: int, ranks: int) -> None:
    said = run("torchrun", ranks, "finetune_t5", f"--tp={tp}", f"--pp={pp}", "--steps=8", f"--output={tmp_path}")
    found = losses(said)
    assert len(found) == 8  # of one rank
    assert found[-1] < found[0] - 1
    assert said.count("answer:") == 1
    assert transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).config.num_layers == 2


@SLOW
@NEEDS_DEEPSPEED
@pytest.mark.timeout(1100)
@pytest.mark.parametrize(
    ("launcher", "tp", "pp", "stage"),
    [("deepspeed", 2, 1, 1), ("deepspeed", 2, 1, 3), ("torchrun", 2, 2, 1), ("accelerate", 1, 2, 1)],
)
def test_llama_under_deepspeed(tmp_path: Path, launcher: str, tp: int, pp: int, stage: int) -> None:
    deepspeed_op.prebuild()
    arguments = [f"--tp={tp}", f"--pp={pp}", f"--stage={stage}", "--steps=8", f"--output={tmp_path}"]
    found = losses(run(launcher, 4, "deepspeed_zero", *arguments))
    assert len(found) == 8
    assert found[-1] < found[0] - 1
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.num_hidden_layers == 4
