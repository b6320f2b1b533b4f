"""Saves that are killed, and disks that are full: what is on the disk is the old checkpoint or the new one."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import oslo_engine as oslo
from oslo_engine.checkpoint import atomic
from oslo_engine.checkpoint.source import open_source
from saves import save_for_ever, save_with_little_room, trained

KILLS = 50


def version_in(folder: Path, model: Any, optimizer: Any) -> int:
    """The version of a checkpoint, every number of which is read."""
    oslo.load_training(folder, model, optimizer)
    open_source(folder).verify()
    numbers = {float(value) for parameter in model.parameters() for value in parameter.detach().unique()}
    numbers |= {float(value) for state in optimizer.state.values() for value in state["momentum_buffer"].unique()}
    assert len(numbers) == 1, f"a mixture of {sorted(numbers)}"
    return int(numbers.pop())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_save_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    folder, chance = tmp_path / "a", random.Random(0)
    model, optimizer = trained(0)
    oslo.save_training(folder, model, optimizer)
    seen = 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "saves"])
    for _ in range(KILLS):
        started = context.Event()
        process = context.Process(target=save_for_ever, args=(folder, seen + 1, started))
        process.start()
        started.wait(60)
        time.sleep(chance.random() * 0.3)  # several saves, or a part of one
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        version = version_in(folder, model, optimizer)
        assert version >= seen
        seen = version
    assert seen > KILLS, "the saves were killed before they had begun"
    oslo.save_training(folder, model, optimizer)
    assert os.listdir(tmp_path) == ["a"]


def test_a_full_disk_is_an_error_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    model, optimizer = trained(1)
    oslo.save_training(folder, model, optimizer)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=save_with_little_room, args=(folder, theirs))
    process.start()
    assert ours.poll(60)
    told = ours.recv()
    process.join()
    assert "saving the model failed" in told
    assert "File too large" in told
    assert version_in(folder, model, optimizer) == 1
    assert os.listdir(tmp_path) == ["a"]


def test_what_a_killed_save_left_is_reported_and_cleared_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = atomic.staging_folder(tmp_path / "a")
    left.mkdir()
    (left / "model_tp=0_pp=0.safetensors").write_bytes(b"half")
    model, optimizer = trained(1)
    with caplog.at_level(logging.WARNING, "oslo_engine"):
        oslo.save_training(tmp_path / "a", model, optimizer)
    assert any(str(left) in record.getMessage() for record in caplog.records)
    assert os.listdir(tmp_path) == ["a"]
