"""A training that stops and goes on, here or at another layout, is the training that never stopped."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import oslo_engine as oslo
from oslo_engine.checkpoint import resume, training
from oslo_engine.checkpoint.source import open_source
from oslo_engine.checkpoint.verify import verify_folder
from oslo_engine.errors import CheckpointError, OsloError
from split_models import VOCAB, whole_model

STEPS = 5
RATES = {"AdamW": 1e-2, "SGD": 1e-4}
STILL = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"dropout_rate": 0.0},
    "llama_two_kv": {},
}


class Position:
    """The position in some data: anything with a state dict."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Run:
    """A model in training. Each batch follows from the position alone."""

    def __init__(self, name: str, tp: int, pp: int, optimizer: str = "AdamW", **more: Any) -> None:
        self.model: Any = oslo.parallelize(whole_model(name, **more), tp=tp, pp=pp, micro_batch_size=2).train()
        named = list(self.model.named_parameters())
        groups = [
            {"params": [parameter for _, parameter in named if parameter.ndim > 1], "weight_decay": 0.1},
            {"params": [parameter for _, parameter in named if parameter.ndim < 2], "weight_decay": 0.0},
        ]
        # A larger eps: the gradient of a key bias is rounding alone, which AdamW would turn into a step of its own.
        more_options = {"SGD": {"momentum": 0.9, "nesterov": True}, "AdamW": {"eps": 1e-3}}
        options: dict[str, Any] = {"lr": RATES[optimizer], **more_options[optimizer]}
        self.optimizer: Any = getattr(torch.optim, optimizer)(groups, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)
        self.position = Position()
        self.pp = pp

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            ids = torch.randint(1, VOCAB, (4, 9), generator=torch.Generator().manual_seed(self.position.step))
            self.optimizer.zero_grad()
            if self.pp == 1:
                loss = self.model(input_ids=ids, labels=ids).loss
                loss.backward()
            else:
                loss = self.model.train_step({"input_ids": ids, "labels": ids})
            oslo.clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.position.step += 1
            losses.append(float(loss.detach()))
        return losses

    def save(self, folder: Path, **more: Any) -> Any:
        return oslo.save_training(folder, self.model, self.optimizer, scheduler=self.scheduler, position=self.position, **more)

    def load(self, folder: Path) -> None:
        oslo.load_training(folder, self.model, self.optimizer, scheduler=self.scheduler, position=self.position)


def start(name: str, tp: int, pp: int, folder: Path, asynchronous: bool, **more: Any) -> list[float]:
    """Train three steps, save, and train on as if nothing had been; the losses of what came after."""
    run = Run(name, tp, pp, **more)
    run.steps(3)
    saving = run.save(folder / "stopped", asynchronous=asynchronous)
    losses = run.steps(STEPS)
    saving.wait()
    run.model.save_pretrained_with_parallel(folder / "never stopped")
    return losses


def go_on(name: str, tp: int, pp: int, folder: Path, **more: Any) -> list[float]:
    run = Run(name, tp, pp, **more)
    run.steps(1)  # what was there before is overwritten
    run.load(folder / "stopped")
    assert run.position.step == 3
    assert run.scheduler.last_epoch == 3
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(run.optimizer.param_groups[0]["initial_lr"] * 0.7)
    losses = run.steps(STEPS)
    run.model.save_pretrained_with_parallel(folder / f"went on {tp} {pp}")
    return losses


def largest_difference(first: Path, second: Path) -> float:
    one, two = open_source(first), open_source(second)
    assert set(one.names()) == set(two.names())
    return max(float((one.read(name) - two.read(name)).abs().max()) for name in one.names())


@pytest.mark.parametrize(("name", "optimizer"), [("gpt2", "AdamW"), ("llama_two_kv", "AdamW"), ("t5", "SGD")])
def test_it_goes_on_at_other_layouts(rank_pool: Any, tmp_path: Path, name: str, optimizer: str) -> None:
    still = STILL[name]
    wanted = rank_pool(4).run(start, name, 2, 2, tmp_path, False, optimizer=optimizer, **still)[0]
    for tp, pp in [(4, 1), (1, 1), (1, 2), (2, 2)]:
        got = rank_pool(tp * pp).run(go_on, name, tp, pp, tmp_path, optimizer=optimizer, **still)
        for losses in got:
            assert losses == pytest.approx(wanted, rel=1e-5)
        assert largest_difference(tmp_path / "never stopped", tmp_path / f"went on {tp} {pp}") < 1e-5


def test_with_dropout_it_goes_on_bit_for_bit(rank_pool: Any, tmp_path: Path) -> None:
    wanted = rank_pool(4).run(start, "gpt2", 2, 2, tmp_path, False)
    assert rank_pool(4).run(go_on, "gpt2", 2, 2, tmp_path) == wanted
    assert largest_difference(tmp_path / "never stopped", tmp_path / "went on 2 2") == 0.0


def test_what_is_saved_in_the_background_is_what_there_was_when_it_began(rank_pool: Any, tmp_path: Path) -> None:
    wanted = rank_pool(4).run(start, "gpt2", 2, 2, tmp_path, True)
    assert rank_pool(4).run(go_on, "gpt2", 2, 2, tmp_path) == wanted


def saved_twice(folder: Path) -> tuple[list[str], bool]:
    run = Run("gpt2", 2, 1)
    run.steps(1)
    first = run.save(folder, asynchronous=True)
    run.steps(1)
    second = run.save(folder, asynchronous=True)
    second.wait()
    other = Run("gpt2", 2, 1)
    other.load(folder)
    return sorted(os.listdir(folder)), first.done and other.position.step == 2


def test_a_save_waits_for_the_one_before(rank_pool: Any, tmp_path: Path) -> None:
    for names, right in rank_pool(2).run(saved_twice, tmp_path / "a"):
        assert right
        assert {"layout.json", "optimizer.json", "training.json", "objects.pt", "random_rank=1.pt"} <= set(names)
    assert os.listdir(tmp_path) == ["a"]


def with_data_parallelism(folder: Path) -> bool:
    run = Run("gpt2", 2, 1, **STILL["gpt2"])
    wrapped = DistributedDataParallel(run.model.gpu_modules(), process_group=run.model.mpu.get_data_parallel_group())
    run.steps(2)
    oslo.save_training(folder, wrapped, run.optimizer)
    other = Run("gpt2", 2, 1)
    oslo.load_training(folder, other.model, other.optimizer)
    one, two = run.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    same = all(torch.equal(one[number][key], two[number][key]) for number in one for key in one[number])
    return same and all(map(torch.equal, run.model.parameters(), other.model.parameters()))


def test_data_parallel_ranks_write_once_and_all_read(rank_pool: Any, tmp_path: Path) -> None:
    assert all(rank_pool(4).run(with_data_parallelism, tmp_path / "a"))
    assert len(list((tmp_path / "a").glob("optimizer_tp=*"))) == 2
    assert len(list((tmp_path / "a").glob("random_rank=*"))) == 4


def test_a_training_checkpoint_is_a_split_checkpoint(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(4).run(start, "gpt2", 2, 2, tmp_path, False)
    source = open_source(tmp_path / "stopped")
    source.verify()
    assert "transformer.wte.weight" in source.names()
    assert not any(":" in name for name in source.names())


# -- what is refused


ALTERED = ["objects.pt", "random_rank=1.pt", "optimizer.json", "optimizer_tp=1_pp=0.safetensors", "model_tp=0_pp=0.safetensors"]


class WithFunction:
    def state_dict(self) -> dict[str, Any]:
        return {"function": print}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


class WithLocalFunction(WithFunction):
    def state_dict(self) -> dict[str, Any]:
        return {"function": lambda: None}


def complaint_about(folder: Path, what: str) -> str:
    """Save, then do something wrong; what was raised. A file that is damaged changes nothing in the model."""
    run = Run("gpt2", 2, 1)
    run.steps(1)
    run.save(folder)
    run.steps(1)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    dist.barrier()
    if dist.get_rank() == 0:
        spoil(folder, what)
    dist.barrier()
    try:
        if what == "unsafe":
            run.save(folder, more=WithFunction())
        elif what == "local":
            run.save(folder, more=WithLocalFunction())
        elif what == "stateless":
            run.save(folder, more=5)
        elif what == "foreign":
            optimizer = torch.optim.AdamW([*run.model.parameters(), nn.Parameter(torch.zeros(3))])
            oslo.save_training(folder, run.model, optimizer)
        elif what == "factored":
            divided = run.model.get_submodule("transformer.h.0.mlp.c_fc").weight  # one number for each of its rows is kept
            run.optimizer.state[divided]["exp_avg_sq_row"] = torch.ones(divided.shape[0])
            run.save(folder)
        elif what == "groups":
            oslo.load_training(folder, run.model, torch.optim.AdamW(run.model.parameters()))
        elif what == "swapped groups":
            run.optimizer.param_groups.reverse()
            run.load(folder)
        elif what == "optimizer":
            oslo.load_training(folder, run.model, torch.optim.SGD(run.model.parameters()))
        elif what == "object":
            oslo.load_training(folder, run.model, run.optimizer, scaler=Position())
        elif what == "model":
            other = Run("llama", 2, 1)
            other.load(folder)
        else:
            run.load(folder)
    except OsloError as error:
        if what.startswith("altered "):
            assert all(map(torch.equal, before, run.model.parameters()))
        return f"{type(error).__name__}: {error}"
    return ""


def spoil(folder: Path, what: str) -> None:
    if what == "no record":
        (folder / "training.json").unlink()
    elif what == "version":
        record = json.loads((folder / "training.json").read_text())
        (folder / "training.json").write_text(json.dumps({**record, "version": 99}))
    elif what == "damaged record":
        record = json.loads((folder / "training.json").read_text())
        (folder / "training.json").write_text(json.dumps({**record, "layout": {"tp": 1}}))
    elif what == "no json":
        (folder / "training.json").write_text("{")
    elif what == "negative step":
        record = json.loads((folder / "training.json").read_text())
        (folder / "training.json").write_text(json.dumps({**record, "random": {"seed": 0, "step": -5}}))
    elif what == "endless ranks":
        record = json.loads((folder / "training.json").read_text())
        (folder / "training.json").write_text(json.dumps({**record, "layout": {"tp": 2, "pp": 1, "dp": 10**30}}))
    elif what == "left over":
        shutil.copy(folder / "random_rank=0.pt", folder / "random_rank=9.pt")
    elif what == "endless file":
        record = json.loads((folder / "training.json").read_text())
        record["files"]["objects.pt"]["size_bytes"] = float("inf")
        (folder / "training.json").write_text(json.dumps(record))
    elif what.startswith("altered "):
        path = folder / what.removeprefix("altered ")
        content = bytearray(path.read_bytes())
        content[-10] ^= 1
        path.write_bytes(content)
    elif what == "missing":
        (folder / "optimizer_tp=1_pp=0.safetensors").unlink()
    elif what == "truncated":
        path = folder / "optimizer_tp=1_pp=0.safetensors"
        path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("unsafe", "cannot be read back safely\n  where: more="),
        ("local", "cannot be read back safely\n  where: more="),
        ("stateless", "an object that is to be saved has no state\n  where: more="),
        ("foreign", "a parameter that is not the model's"),
        ("factored", "cannot be divided like it"),
        ("groups", "another number of parameter groups"),
        ("swapped groups", "in another group"),
        ("optimizer", "with another optimizer"),
        ("object", "without something that is to be loaded"),
        ("model", "with another model"),
        ("no record", "no training to go on with"),
        ("version", "another version"),
        ("damaged record", "the record of the training is damaged"),
        ("no json", "the record of the training is damaged"),
        ("negative step", "the record of the training is damaged"),
        ("endless ranks", "the record of the training is damaged"),
        ("left over", "random_rank=9.pt"),
        ("endless file", "the record of the training is damaged"),
        *((f"altered {file}", file) for file in ALTERED),
        ("missing", "optimizer_tp=1_pp=0.safetensors"),
        ("truncated", "optimizer_tp=1_pp=0.safetensors"),
    ],
)
def test_what_cannot_be_right_is_one_error_on_every_rank(rank_pool: Any, tmp_path: Path, what: str, told: str) -> None:
    for complaint in rank_pool(2).run(complaint_about, tmp_path / "a", what):
        assert told in complaint
    assert os.listdir(tmp_path) == ["a"], "nothing half-written is left"


def save_with_config(folder: Path) -> None:
    run = Run("gpt2", 2, 1)
    run.steps(1)
    run.save(folder)


def test_verify_names_whatever_file_of_a_training_is_missing_or_altered(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(save_with_config, tmp_path / "a")
    names = sorted(path.name for path in (tmp_path / "a").iterdir() if "config" not in path.name)
    assert len(names) == 10
    assert len(verify_folder(tmp_path / "a").names()) > 0
    for name in names:
        for what in ("missing", "altered"):
            if what == "altered" and name in ("layout.json", "training.json"):
                continue  # nothing says what these were
            folder = tmp_path / f"{name} {what}"
            shutil.copytree(tmp_path / "a", folder)
            if what == "missing":
                (folder / name).unlink()
            else:
                spoil(folder, f"altered {name}")
            with pytest.raises(CheckpointError, match=re.escape(name)):
                verify_folder(folder)


def refused_save_leaves_the_old(folder: Path) -> bool:
    run = Run("gpt2", 2, 1)
    run.steps(1)
    run.save(folder)
    run.steps(1)
    try:
        run.save(folder, more=WithFunction())
    except CheckpointError:
        run.load(folder)
    return run.position.step == 1


def test_a_save_that_fails_leaves_the_old_one(rank_pool: Any, tmp_path: Path) -> None:
    assert all(rank_pool(2).run(refused_save_leaves_the_old, tmp_path / "a"))


def failing_in_background(folder: Path) -> str:
    run = Run("gpt2", 2, 1)
    run.steps(1)
    run.save(folder)
    write = training._write_files

    def broken(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        training._write_files = broken
    run.steps(1)
    saving = run.save(folder, asynchronous=True)
    training._write_files = write if saving.done else training._write_files
    try:
        saving.wait()
    except (OsloError, OSError) as error:
        training._write_files = write
        run.load(folder)
        return f"{error} {run.position.step}"
    return ""


def test_a_failure_in_the_background_is_told_by_wait_on_every_rank(rank_pool: Any, tmp_path: Path) -> None:
    for told in rank_pool(2).run(failing_in_background, tmp_path / "a"):
        assert "No space left" in told
        assert told.endswith(" 1"), "the old checkpoint is still there"


def unused(folder: Path) -> list[str]:
    run = Run("gpt2", 1, 1)
    run.steps(1)
    run.save(folder)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    resume.logger.addHandler(handler)
    try:
        oslo.load_training(folder, run.model)
    finally:
        resume.logger.removeHandler(handler)
    return records


def test_what_is_there_and_not_asked_for_is_told(tmp_path: Path) -> None:
    (told,) = unused(tmp_path / "a")
    assert "position, scheduler, optimizer" in told
