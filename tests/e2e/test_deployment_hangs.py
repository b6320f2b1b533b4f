"""Workers of a deployed model that hang: they are ended, calls fail within the stated time, and new workers take the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import oslo_engine as oslo
from deployed_model import Sleeps, StandsStill, varied_model, wait_until_gone
from oslo_engine.errors import WorkerHungError
from small_models import VOCAB

SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
SILENCE_S, STALL_S = 3.0, 4.0
SLACK_S = 15.0  # of a busy machine


def prompt(rows: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def unsplit() -> Any:
    return varied_model()


@pytest.fixture(scope="module")
def folder(unsplit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("gpt2")
    unsplit.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    settings = oslo.Deployment(threads_per_worker=1, silence_timeout_s=SILENCE_S, stall_timeout_s=STALL_S)
    with oslo.GPT2LMHeadModel.from_pretrained_with_parallel(folder, tensor_parallel_size=2, deployment=settings) as deployed:
        yield deployed


def check_recovered(model: Any, unsplit: Any, before: tuple[int, ...]) -> None:
    assert torch.equal(model.generate(prompt(), **SETTINGS), unsplit.generate(prompt(), **SETTINGS))
    assert set(model.health().pids).isdisjoint(before)
    assert wait_until_gone(before, 2) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_calls_on_a_stopped_worker_fail_in_time(model: Any, unsplit: Any, rank: int) -> None:
    pids = model.health().pids
    call = model.start_generate(prompt(), stopping_criteria=[Sleeps(0.05)], **{**SETTINGS, "max_new_tokens": 50})
    while not model.health().running:
        time.sleep(0.01)
    os.kill(pids[rank], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerHungError, match=f"rank {rank}") as caught:
        call.result(60)
    assert time.monotonic() - start < SILENCE_S + SLACK_S
    assert any(f"rank {1 - rank} stands here" in note for note in caught.value.__notes__)
    check_recovered(model, unsplit, pids)


def test_a_worker_that_does_not_read_holds_nobody_up(model: Any, unsplit: Any) -> None:
    """What is sent to it does not fit into the pipe."""
    pids = model.health().pids
    os.kill(pids[1], signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(WorkerHungError, match="no sign of life"):
        model.generate(prompt(rows=5000), **SETTINGS)
    assert time.monotonic() - start < SILENCE_S + SLACK_S
    check_recovered(model, unsplit, pids)


def test_an_idle_worker_that_stops_is_replaced(model: Any, unsplit: Any) -> None:
    pids, restarts = model.health().pids, model.health().restarts
    os.kill(pids[0], signal.SIGSTOP)
    deadline = time.monotonic() + SILENCE_S + 40
    while model.health().restarts == restarts and time.monotonic() < deadline:
        time.sleep(0.05)
    check_recovered(model, unsplit, pids)
    assert model.health().restarts == restarts + 1


def test_workers_that_wait_for_one_another_are_ended_and_say_where_they_stand(model: Any, unsplit: Any) -> None:
    pids = model.health().pids
    start = time.monotonic()
    with pytest.raises(WorkerHungError, match="wait for one another") as caught:
        model.generate(prompt(), logits_processor=[StandsStill(1)], **SETTINGS)
    assert STALL_S - 1 < time.monotonic() - start < STALL_S + SLACK_S
    notes = "\n".join(caught.value.__notes__)
    assert "time.sleep(1000)" in notes
    assert "all_reduce" in notes.partition("rank 1 stands here")[0]
    check_recovered(model, unsplit, pids)


def test_a_call_that_goes_on_slowly_is_left_alone(model: Any, unsplit: Any) -> None:
    slow = model.generate(prompt(), stopping_criteria=[Sleeps(0.9)], **SETTINGS)  # 7 s in all
    assert torch.equal(slow, unsplit.generate(prompt(), **SETTINGS))


def test_what_was_fused_is_fused_again_after_a_restart(model: Any, unsplit: Any) -> None:
    assert model.fusion_report is None
    assert model.fuse("mlp") is model
    fused = model.fusion_report.replaced
    assert len(fused) > 0
    pids = model.health().pids
    os.kill(pids[0], signal.SIGKILL)
    assert wait_until_gone(pids, 5) == []
    check_recovered(model, unsplit, pids)
    assert model.fusion_report.replaced == fused
    model.unfuse()
    pids = model.health().pids
    os.kill(pids[0], signal.SIGKILL)
    assert wait_until_gone(pids, 5) == []
    assert model.fusion_report is None


SCRIPT = """
import os, sys, time
import oslo_engine as oslo
model = oslo.GPT2LMHeadModel.from_pretrained_with_parallel(
    sys.argv[1], tensor_parallel_size=2, deployment=oslo.Deployment(threads_per_worker=1)
)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, *model.health().pids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_end_with_a_parent_whose_child_lives_on(folder: Path, tmp_path: Path, stopped: bool) -> None:
    """The child holds the parent's pipes open; a stopped worker can do nothing by itself."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(oslo.__file__).parent.parent)}
    command = [sys.executable, str(script), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    child, pids = 0, []  # type: int, list[int]
    try:
        assert process.stdout is not None
        child, *pids = (int(word) for word in process.stdout.readline().split())
        assert len(pids) == 2
        if stopped:
            os.kill(child, signal.SIGKILL)
            os.kill(pids[1], signal.SIGSTOP)
        process.kill()
        process.wait()
        assert wait_until_gone(pids, 10.0 if stopped else 2.0) == []
    finally:
        process.kill()
        for pid in (child, *pids) if child else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
