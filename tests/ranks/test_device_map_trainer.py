"""Transformers' trainers on a placed encoder-decoder: what they find on one device they find on two."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pretend_devices
from oslo_engine import parallelize
from placed_models import text_model
from rank_pool import RankPool

pytest.importorskip("accelerate", reason="Transformers' Trainer needs accelerate")


@pytest.fixture(scope="module")
def pretend() -> Iterator[RankPool]:
    pool = RankPool(1)
    yield pool
    pool.kill()


def trained(model: Any, folder: str) -> tuple[list[float], float, Any]:
    """Losses of two steps, loss of an evaluation, and what prediction generates."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    rows = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:5].clone()}
        for ids in torch.randint(3, 60, (8, 9), generator=torch.Generator().manual_seed(0))
    ]
    arguments = Seq2SeqTrainingArguments(
        folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        predict_with_generate=True,
        generation_max_length=7,
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    with pretend_devices.single_threaded_backward():
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], trainer.predict(rows).predictions


def check_trainer(folder: str) -> None:
    pretend_devices.install()
    whole, _, _ = text_model("seq2seq", "t5")
    placed = copy.deepcopy(whole)
    parallelize(placed, device_map={"encoder": {"sim:0": [0, 1], "sim:1": [2, 3]}, "decoder": {"cpu": [0, 1], "sim:1": [2, 3]}})
    expected, found = trained(whole, f"{folder}/whole"), trained(placed, f"{folder}/placed")
    assert len(found[0]) == 2
    assert all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(found[0], expected[0], strict=True))
    assert math.isclose(found[1], expected[1], rel_tol=1e-5)
    assert (found[2] == expected[2]).all()
    devices = {str(parameter.device) for parameter in placed.parameters()}
    assert devices == {"sim:0", "sim:1", "cpu"}, "the trainer has moved the model"


def check_plain_trainer(folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    pretend_devices.install()
    whole, batch, _ = text_model("causal", "gpt2")
    placed = copy.deepcopy(whole)
    parallelize(placed, device_map={"sim:0": [0, 1], "sim:1": [2, 3]})
    rows = [{"input_ids": ids, "labels": ids.clone()} for ids in batch["input_ids"].repeat(3, 1)]
    found = []
    for model in (placed, whole):
        arguments = TrainingArguments(
            folder, max_steps=2, logging_steps=1, report_to=[], save_strategy="no", prediction_loss_only=True, use_cpu=True,
            per_device_train_batch_size=4, seed=0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        with pretend_devices.single_threaded_backward():
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append([*losses, trainer.evaluate()["eval_loss"]])
    assert len(found[0]) == 3
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_trainer_trains_and_evaluates_alike(pretend: RankPool, tmp_path: Path) -> None:
    pretend.run(check_plain_trainer, str(tmp_path), timeout_s=100)


def test_seq2seq_trainer_trains_evaluates_and_predicts_alike(pretend: RankPool, tmp_path: Path) -> None:
    pretend.run(check_trainer, str(tmp_path), timeout_s=100)
