"""Generating from prompts in a worker: joined, each row with its own end, streamed and cancelled by the prompt."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from oslo_engine.deploy.batching import Joined, end_tokens, join, pad_token, split
from oslo_engine.deploy.messages import Cancel, RunPrompts, Tokens, pack, receive


def run_prompts(model: Any, work: RunPrompts, pipe: Connection | None) -> list[Tensor]:
    """What ``generate`` returns for each prompt.

    Args:
        pipe: to the parent, on the one rank that sends tokens and hears of cancellations. What it decides reaches the other
            ranks as a stopping criterion that fires on one rank only.
    """
    pad = pad_token(work.settings, model.generation_config)
    ends = end_tokens(work.settings, model.generation_config)
    joined = join(work.prompts, pad)
    device = next(model.parameters()).device
    rows = RowEnds(joined, work, pipe)
    settings: dict[str, Any] = dict(work.settings)
    if joined.limits is not None:
        settings["max_new_tokens"] = max(joined.limits)
    if pipe is not None and any(prompt.streams for prompt in work.prompts):
        settings["streamer"] = _Streamer(joined, work, pipe, ends)
    if joined.mask is not None:
        settings["attention_mask"] = joined.mask.to(device)
    given = settings.pop("stopping_criteria", None) or []
    output = model.generate(joined.ids.to(device), stopping_criteria=StoppingCriteriaList([*given, rows]), **settings)
    return split(output.cpu(), work.prompts, joined, pad, ends)


class RowEnds(StoppingCriteria):
    """Ends each row at its own number of new tokens, or when its prompt was cancelled."""

    def __init__(self, joined: Joined, work: RunPrompts, pipe: Connection | None) -> None:
        self._pipe, self._number, self._start = pipe, work.number, joined.ids.shape[1]
        self._limits = None if joined.limits is None else torch.tensor(joined.limits)
        self._rows = torch.tensor(joined.prompt_of_row)
        self._cancelled = torch.zeros(len(joined.prompt_of_row), dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        while self._pipe is not None and self._pipe.poll():
            message = receive(self._pipe)  # the end of the parent ends this process elsewhere
            if isinstance(message, Cancel) and message.number == self._number:
                self._cancelled |= self._rows == message.prompt
        done = self._cancelled
        if self._limits is not None:
            done = done | (self._limits <= input_ids.shape[1] - self._start)
        return done.to(input_ids.device)


class _Streamer(BaseStreamer):
    """Sends the tokens of prompts that stream (each of one row), up to the row's end."""

    def __init__(self, joined: Joined, work: RunPrompts, pipe: Connection, ends: list[int]) -> None:
        self._pipe, self._number, self._ends = pipe, work.number, set(ends)
        self._left = {
            row: None if joined.limits is None else joined.limits[row]
            for row, prompt in enumerate(joined.prompt_of_row)
            if work.prompts[prompt].streams
        }
        self._prompt_of_row = joined.prompt_of_row
        self._prompts_to_come = 1  # generate puts the prompt first, or the decoder's start

    def put(self, value: Tensor) -> None:
        if self._prompts_to_come:
            self._prompts_to_come -= 1
            return
        tokens, sent = value.reshape(len(self._prompt_of_row), -1).tolist(), []
        for row in list(self._left):
            for token in tokens[row]:
                if row in self._left:
                    sent.append((self._prompt_of_row[row], token))
                    self._count(row, token)
        if sent:
            self._pipe.send_bytes(pack(Tokens(self._number, tuple(sent))))

    def _count(self, row: int, token: int) -> None:
        left = self._left[row]
        self._left[row] = None if left is None else left - 1
        if token in self._ends or self._left[row] == 0:
            del self._left[row]

    def end(self) -> None:
        pass
