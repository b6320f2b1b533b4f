"""What the children of the tests of killed saves do; they import it by name."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import torch

import oslo_engine as oslo
from oslo_engine.errors import CheckpointError
from split_models import whole_model

BATCH = {"input_ids": torch.arange(10, 18)[None], "labels": torch.arange(10, 18)[None]}


def trained(version: int) -> tuple[Any, Any]:
    """A model and an optimizer in which every number is the version."""
    model = oslo.parallelize(whole_model("gpt2"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(**BATCH).loss.backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)
            optimizer.state[parameter]["momentum_buffer"].fill_(version)
    return model, optimizer


def save_for_ever(folder: Path, first: int, started: Any) -> None:
    model, optimizer = trained(first)
    started.set()
    for version in range(first, first + 10_000):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(version)
                optimizer.state[parameter]["momentum_buffer"].fill_(version)
        oslo.save_training(folder, model, optimizer)


def save_with_little_room(folder: Path, told: Any) -> None:
    """As on a disk that is full: no file may be longer than the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    model, optimizer = trained(2)
    try:
        oslo.save_training(folder, model, optimizer)
    except CheckpointError as error:
        told.send(str(error))
    else:
        told.send("")
