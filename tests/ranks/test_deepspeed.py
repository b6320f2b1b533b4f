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
from oslo_engine.checkpoint.split import SplitSource
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
    optimizer = torch.optim.AdamW(more.pop("groups"), lr=1e-2, eps=1e-3) if "groups" in more else None
    settings = {"mpu": model.mpu, **more}
    built, *_ = deepspeed.initialize(
        model=model.gpu_modules(),
        model_parameters=model.gpu_parameters(),
        optimizer=optimizer or optimizer_for(model.gpu_parameters()),
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


def in_half_precision(bad_rank: int) -> tuple[list[float], list[bool]]:
    """Loss scales after three steps in fp16, and whether each changed the weights; one rank overflows in the second."""
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # of this CPU it says that fp16 is slow
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=2)
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1, "hysteresis": 1}
    built = engine(model, 1, config={"fp16": fp16})
    scales, changed = [], []
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        built.backward(built(**batches(Recipe(rows=4), step)[0]).loss)
        if step == 1 and torch.distributed.get_rank() == bad_rank:
            # ZeRO has taken the gradients by now, into buffers of its own.
            next(gradient for group in built.optimizer.averaged_gradients.values() for gradient in group)[0] = float("inf")
        built.step()
        scales.append(float(built.optimizer.loss_scale))
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    return scales, changed


def test_an_overflow_of_fp16_on_one_rank_skips_the_step_on_all(rank_pool: Any) -> None:
    for scales, changed in rank_pool(4).run(in_half_precision, 2, timeout_s=200):
        assert changed == [True, False, True]
        assert scales[1] < scales[0]


def curve_with(stage: int, more: dict[str, Any]) -> list[float]:
    model, _ = unsplit(Recipe())
    oslo.parallelize(model, tp=2)
    built = engine(model, stage, config=more)
    copy, losses = model.mpu.get_data_parallel_rank(), []
    for step in range(4):
        batch = {name: value.chunk(2)[copy] for name, value in batches(Recipe(), step)[0].items()}
        loss = built(**batch).loss
        built.backward(loss)
        built.step()
        losses.append(_mean_over(loss, model.mpu.get_data_parallel_group()))
    return losses


def _mean_over(loss: torch.Tensor, group: Any) -> float:
    total = loss.detach().double()
    torch.distributed.all_reduce(total, group=group)
    return float(total) / torch.distributed.get_world_size(group)


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize("stage", [1, 3])
def test_an_offloaded_optimizer_takes_the_same_steps(rank_pool: Any, stage: int) -> None:
    wanted = train_unsplit(Recipe(steps=4, clip=1e9)).losses
    config = {"zero_optimization": {"stage": stage, **OFFLOADED}, "gradient_clipping": 0.0}
    for losses in rank_pool(4).run(curve_with, stage, config, timeout_s=200):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_bf16_of_deepspeed_is_within_rounding_of_single_precision(rank_pool: Any) -> None:
    wanted = train_unsplit(Recipe(steps=4, clip=1e9)).losses
    found = rank_pool(4).run(curve_with, 1, {"bf16": {"enabled": True}, "gradient_clipping": 0.0}, timeout_s=200)
    for losses in found:
        assert losses == found[0]
        assert losses == pytest.approx(wanted, rel=0.02)
        assert losses != pytest.approx(wanted, rel=1e-6)


# -- training checkpoints


class Stopped:
    """A training that can be saved; stage 0 is plain AdamW without DeepSpeed."""

    def __init__(self, tp: int, pp: int, stage: int, config: dict[str, Any]) -> None:
        model, _ = unsplit(Recipe())
        self.model: Any = oslo.parallelize(model, tp=tp, pp=pp)
        self.engine: Any = None
        if stage:
            self.engine = engine(model, stage, config={"gradient_clipping": 0.0, **config}, groups=groups(model))
        self.optimizer = torch.optim.AdamW(groups(model), lr=1e-2, eps=1e-3) if self.engine is None else self.engine.optimizer

    def steps(self, numbers: range) -> list[float]:
        mpu, losses = self.model.mpu, []
        copy, copies, group = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), mpu.get_data_parallel_group()
        for number in numbers:
            output = (self.engine or self.model)(**{k: v.chunk(copies)[copy] for k, v in batches(Recipe(), number)[0].items()})
            total = torch.zeros(())
            for loss in (
                [output.loss] if self.model.mpu.get_pipeline_parallel_world_size() == 1 else (micro.loss for micro in output)
            ):
                (torch.Tensor.backward if self.engine is None else self.engine.backward)(loss)
                total += loss.detach().float()
            if self.engine is None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                self.engine.step()
            losses.append(_mean_over(total, group))
        return losses


def groups(model: Any) -> list[dict[str, Any]]:
    """In another order than the model's, and so that partitions end inside of parameters."""
    return [
        {"params": [parameter for parameter in model.parameters() if parameter.ndim < 2], "weight_decay": 0.0},
        {"params": [parameter for parameter in model.parameters() if parameter.ndim > 1], "weight_decay": 0.1},
    ]


def never_stopped(steps: int) -> list[float]:
    model, _ = unsplit(Recipe())
    optimizer, losses = torch.optim.AdamW(groups(model), lr=1e-2, eps=1e-3), []
    for number in range(steps):
        loss = model(**batches(Recipe(), number)[0]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def stop(folder: Path, tp: int, pp: int, stage: int, config: dict[str, Any], asynchronous: bool) -> list[float]:
    run = Stopped(tp, pp, stage, config)
    run.steps(range(3))
    saving = oslo.save_training(folder, run.model, run.optimizer, asynchronous=asynchronous)
    losses = run.steps(range(3, 6))
    saving.wait()
    return losses


def go_on(folder: Path, tp: int, pp: int, stage: int, config: dict[str, Any], before: int) -> tuple[list[float], float]:
    """Losses after loading, and the scale of losses."""
    run = Stopped(tp, pp, stage, config)
    run.steps(range(10, 10 + before))  # what was there is overwritten
    oslo.load_training(folder, run.model, run.optimizer)
    scale = float(run.optimizer.loss_scale) if stage else 1.0
    return run.steps(range(3, 6)), scale


@pytest.mark.parametrize("asynchronous", [False, True])
def test_zero_1_goes_on_at_other_layouts_and_without_deepspeed(rank_pool: Any, tmp_path: Path, asynchronous: bool) -> None:
    wanted = never_stopped(6)[3:]
    assert rank_pool(4).run(stop, tmp_path, 2, 1, 1, {}, asynchronous, timeout_s=200)[0] == pytest.approx(wanted, rel=1e-5)
    here = [(2, 1, 1, 1), (1, 1, 1, 0), (4, 1, 1, 1), (2, 2, 1, 0), (1, 2, 1, 1), (2, 1, 2, 0)]
    for tp, pp, stage, before in here if not asynchronous else here[:1]:
        for losses, _ in rank_pool(4).run(go_on, tmp_path, tp, pp, stage, {}, before, timeout_s=200):
            assert losses == pytest.approx(wanted, rel=1e-5), (tp, pp, stage)
    for losses, _ in rank_pool(1).run(go_on, tmp_path, 1, 1, 0, {}, 1, timeout_s=200):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_a_training_without_deepspeed_goes_on_with_zero_1(rank_pool: Any, tmp_path: Path) -> None:
    wanted = never_stopped(6)[3:]
    rank_pool(2).run(stop, tmp_path, 2, 1, 0, {}, False, timeout_s=200)
    for before in (0, 1):
        for losses, _ in rank_pool(4).run(go_on, tmp_path, 1, 2, 1, {}, before, timeout_s=200):
            assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("config", [{"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1, **OFFLOADED}}], ids=str)
def test_master_weights_are_saved(rank_pool: Any, tmp_path: Path, config: dict[str, Any]) -> None:
    wanted = rank_pool(4).run(stop, tmp_path, 2, 1, 1, config, False, timeout_s=200)
    for rank, (losses, _) in enumerate(rank_pool(4).run(go_on, tmp_path, 2, 1, 1, config, 1, timeout_s=200)):
        assert losses == wanted[rank]
    optimizer, weights = SplitSource(tmp_path, "optimizer.json"), SplitSource(tmp_path)
    masters = {name: optimizer.read(f"fp32:{name}") for name in weights.names() if f"fp32:{name}" in optimizer.names()}
    assert len(masters) > 20
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.to(weights.dtype(name)), weights.read(name)), name
    if "bf16" in config:
        assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())


def refused_states(folder: Path, tp: int, stage: int) -> list[str]:
    run, messages = Stopped(tp, 1, stage, {}), []
    for call in (oslo.save_training, oslo.load_training):
        with pytest.raises(UnsupportedError) as refused:
            call(folder, run.model, run.optimizer)
        messages.append(str(refused.value))
    return messages


def test_the_optimizer_of_zero_3_is_refused_with_what_to_call(rank_pool: Any, tmp_path: Path) -> None:
    for saving, loading in rank_pool(4).run(refused_states, tmp_path, 2, 3, timeout_s=200):
        assert "engine.save_checkpoint" in saving
        assert "engine.load_checkpoint" in loading


def scale_kept(folder: Path) -> tuple[float, float]:
    """A scale of losses that was lowered, saved and loaded."""
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    config = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}}
    run = Stopped(2, 1, 1, config)
    run.steps(range(3))
    oslo.save_training(folder, run.model, run.optimizer)
    _, loaded = go_on(folder, 1, 1, 1, config, 0)
    return float(run.optimizer.loss_scale), loaded


def test_the_scale_of_losses_in_fp16_is_saved(rank_pool: Any, tmp_path: Path) -> None:
    for saved, loaded in rank_pool(2).run(scale_kept, tmp_path, timeout_s=200):
        assert saved == loaded
        assert saved != 16.0


# -- its own checkpoints


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
