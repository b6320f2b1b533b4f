"""Transformers' Trainer on a small model, unsplit or over ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import oslo_engine as oslo
import small_models
from training_runs import Recipe, unsplit


class Texts(Dataset[dict[str, list[int]]]):
    """Rows of different lengths, padded by the collator."""

    def __init__(self, rows: int = 24, *, seed: int = 0, fixed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = [fixed or int(n) for n in torch.randint(4, 11, (rows,), generator=generator)]
        self.rows = [torch.randint(3, small_models.VOCAB, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", 0), "attention_mask": mask, "labels": padded("labels", -100)}


def arguments(cls: Any, folder: Path, copies: int, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8 // copies,
        "per_device_eval_batch_size": 8 // copies,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        "max_grad_norm": 0.5,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **more,
    }
    return cls(output_dir=str(folder), **settings)


def as_launched() -> None:
    """Let Accelerate see what a launcher would have told it; each job begins with a new state of it."""
    from accelerate.state import AcceleratorState, GradientState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def curve(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def reference_trainer(folder: Path, name: str = "gpt2", **more: Any) -> Any:
    import transformers

    return trainer_of(transformers, unsplit(Recipe(name))[0], folder, 1, **more)


def split_trainer(folder: Path, tp: int, pp: int, name: str = "gpt2", **more: Any) -> Any:
    as_launched()
    model, _ = unsplit(Recipe(name))
    oslo.parallelize(model, tp=tp, pp=pp)
    return trainer_of(oslo, model, folder, model.mpu.get_data_parallel_world_size(), **more)


def trainer_of(package: Any, model: Any, folder: Path, copies: int, *, generate: bool = False, **more: Any) -> Any:
    """The Trainer of ``package``; generate: Seq2SeqTrainer, predicting with it."""
    kind = "Seq2SeqTrain" if generate else "Train"
    if generate:
        more |= {"predict_with_generate": True, "generation_max_length": 8}
    return getattr(package, f"{kind}er")(
        model=model,
        args=arguments(getattr(package, f"{kind}ingArguments"), folder, copies, **more),
        train_dataset=Texts(fixed=6 if generate else 0),  # T5 takes the mean over a batch, and copies have a part each
        eval_dataset=Texts(11, seed=1),
        data_collator=collate,
    )
