"""DeepSpeed around a split model. ``make test-slow`` installs it."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_op
import oslo_engine as oslo
from oslo_engine.errors import PlanError, UnsupportedError
from training_runs import Recipe, batches, differences, import_deepspeed, optimizer_for, train_rank, train_unsplit, unsplit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed (make test-slow does it)"
    ),
]

RUNS = [
    Recipe(tp=2, dp=2, wrapper="zero0", accumulation=2),
    Recipe(tp=2, dp=2, wrapper="zero1", accumulation=2),
    Recipe(tp=2, dp=2, wrapper="zero2", accumulation=2),
    Recipe(tp=2, dp=2, wrapper="zero3", accumulation=2),
    Recipe(pp=2, dp=2, wrapper="zero0", accumulation=2),
    Recipe(pp=2, dp=2, wrapper="zero1", accumulation=2),
    Recipe(tp=2, pp=2, wrapper="zero0"),
    Recipe("t5", tp=2, pp=2, wrapper="zero1"),
    Recipe("mixtral", tp=2, dp=2, wrapper="zero3"),
    Recipe("gpt2", tp=2, pp=2, wrapper="zero1", lora=True),
    Recipe("llama", tp=2, dp=2, wrapper="zero2", lora=True),
]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    deepspeed_op.prebuild()


@pytest.mark.parametrize("recipe", RUNS, ids=str)
def test_losses_norms_and_weights_are_those_of_one_process(rank_pool: Any, recipe: Recipe) -> None:
    found = differences(recipe, train_unsplit(recipe), rank_pool(4).run(train_rank, recipe, timeout_s=200))
    assert found["loss"] < 1e-5
    assert found["norm"] < 1e-5
    assert found["weight"] < 1e-5


def engine(model: Any, stage: int, **more: Any) -> Any:
    import_deepspeed()
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **more.pop("config", {}),
    }
    settings = {"mpu": model.mpu, **more}
    built, *_ = deepspeed.initialize(
        model=model.gpu_modules(),
        model_parameters=model.gpu_parameters(),
        optimizer=optimizer_for(model.gpu_parameters()),
        config=config,
        **settings,
    )
    return built


def refused(stage: int, tp: int, pp: int, name: str, more: dict[str, Any]) -> str:
    model, _ = unsplit(Recipe(name))
    oslo.parallelize(model, tp=tp, pp=pp)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises((UnsupportedError, PlanError)) as caught:
        engine(model, stage, **more)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    return str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_2_and_3_with_a_pipeline_are_refused_before_anything_is_built(rank_pool: Any, stage: int) -> None:
    for message in rank_pool(4).run(refused, stage, 1, 2, "gpt2", {}, timeout_s=200):
        assert "backward" in message
        assert "use ZeRO 1" in message


def test_an_engine_that_was_not_given_the_mpu_is_refused(rank_pool: Any) -> None:
    for message in rank_pool(4).run(refused, 1, 2, 1, "gpt2", {"mpu": None}, timeout_s=200):
        assert "expected: mpu=model.mpu" in message


def test_clipping_kv_heads_that_several_ranks_hold_is_refused(rank_pool: Any) -> None:
    for message in rank_pool(4).run(refused, 1, 4, 1, "llama", {"config": {"gradient_clipping": 0.5}}, timeout_s=200):
        assert "KV heads" in message


def bytes_of_optimizer(stage: int) -> int:
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=2)
    built = engine(model, stage)
    (batch,) = batches(Recipe(rows=4), 0)
    built.backward(built(**batch).loss)
    built.step()
    optimizer = getattr(built.optimizer, "optimizer", built.optimizer)
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.element_size() for value in kept if value.ndim)


def test_zero_1_with_two_copies_keeps_half_of_the_optimizer_on_each(rank_pool: Any) -> None:
    whole = rank_pool(4).run(bytes_of_optimizer, 0, timeout_s=200)
    for divided, undivided in zip(rank_pool(4).run(bytes_of_optimizer, 1, timeout_s=200), whole, strict=True):
        assert divided == pytest.approx(undivided / 2, rel=0.01)


def saved_and_loaded(folder: Path) -> tuple[list[float], list[float]]:
    """DeepSpeed's own checkpoint, at tp=2, pp=2: two steps after it, and the same two after loading it."""
    found = []
    for run in range(2):
        model, _ = unsplit(Recipe())
        oslo.parallelize(model, tp=2, pp=2)
        built = engine(model, 1)
        if run == 0:
            _steps(built, range(2))
            built.save_checkpoint(str(folder))
        else:
            built.load_checkpoint(str(folder))
        found.append(_steps(built, range(2, 4)))
    return found[0], found[1]


def _steps(built: Any, steps: Any) -> list[float]:
    losses = []
    for step in steps:
        total = 0.0
        for micro in built(**batches(Recipe(rows=4), step)[0]):
            built.backward(micro.loss)
            total += micro.loss.item()
        built.step()
        losses.append(total)
    return losses


def test_its_own_checkpoints_go_on(rank_pool: Any, tmp_path: Path) -> None:
    for going_on, loaded in rank_pool(4).run(saved_and_loaded, tmp_path, timeout_s=200):
        assert loaded == going_on


def test_a_lock_of_a_build_that_was_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "op").mkdir()
    lock = tmp_path / "op" / "lock"
    lock.touch()
    assert deepspeed_op.remove_stale_locks() == []  # a build that is just running
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    assert deepspeed_op.remove_stale_locks() == [lock]
    assert not lock.exists()
