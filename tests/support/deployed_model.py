"""Checkpoints of small models whose texts vary, to be deployed; and what of their processes is left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

import small_models


def varied_model(name: str = "gpt2", **more: Any) -> Any:
    cls, config, _ = getattr(small_models, name)(**more)
    config.tie_word_embeddings = False
    model = cls(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model.eval()


def wait_until_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Those of these processes that are still there at the end of the time (zombies do not count)."""
    left = list(pids)
    deadline = time.monotonic() + timeout_s
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if _lives(pid)]
        time.sleep(0.02)
    return left


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def dies_on(rank: int) -> None:
    """Ends this process if it is this rank: for a start that fails on one rank."""
    import torch.distributed as dist

    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


class Sleeps(StoppingCriteria):
    """Makes a generation last."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class StandsStill(LogitsProcessor):
    """Never comes back on one rank, so that the others wait for it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        if dist.get_rank() == self.rank:
            time.sleep(1000)
        return scores


class FailsOnRank(LogitsProcessor):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        if dist.get_rank() == self.rank:
            raise ValueError("this processor fails on one rank")
        return scores
