"""Transformers' Trainer on a split model: the curves, norms, metrics and predictions of the unsplit one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import oslo_engine as oslo
from trainer_runs import curve, reference_trainer, split_trainer


def trained(folder: Path, tp: int, pp: int, more: dict[str, Any]) -> dict[str, Any]:
    trainer = split_trainer(folder, tp, pp, **more)
    trainer.train()
    metrics = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset)
    trainer.save_model(str(folder / "merged"))
    return {
        "loss": curve(trainer),
        "norm": curve(trainer, "grad_norm"),
        "eval": metrics["eval_loss"],
        "predictions": predicted.predictions,
    }


LAYOUTS = [(2, 1), (2, 2), (1, 2)]


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_trains_evaluates_and_predicts_as_on_one_process(
    rank_pool: Any, tmp_path: Path, tp: int, pp: int, accumulation: int
) -> None:
    rows, more = 8 // accumulation, {"gradient_accumulation_steps": accumulation}
    theirs = {**more, "per_device_train_batch_size": rows * tp * pp // 4}
    reference = reference_trainer(tmp_path / "one", **more, per_device_train_batch_size=rows)
    reference.train()
    wanted = reference.predict(reference.eval_dataset)
    for found in rank_pool(4).run(trained, tmp_path, tp, pp, theirs):
        assert found["loss"] == pytest.approx(curve(reference), rel=1e-4)
        assert found["norm"] == pytest.approx(curve(reference, "grad_norm"), rel=1e-4)
        assert found["predictions"].shape == wanted.predictions.shape
        real = wanted.label_ids != -100  # copies pad their own part of a batch
        torch.testing.assert_close(found["predictions"][real], wanted.predictions[real], rtol=1e-3, atol=1e-4)
    merged = oslo.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, value in merged.named_parameters():
        torch.testing.assert_close(value, reference.model.get_parameter(name), rtol=1e-3, atol=1e-5, msg=name)
