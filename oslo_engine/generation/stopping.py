"""When to stop, on all ranks at once, and the caller's streamer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from oslo_engine.generation.agreement import Agreement, failed_elsewhere

_FAILED = 2


class AgreedCriteria(StoppingCriteriaList):
    """Stopping criteria: a row that ends on one rank ends on all.

    Communication: where any rank has criteria of its own or a streamer, one all-reduce of [rows] numbers a step. Lengths and
    end-of-text tokens need none: the tokens are the same everywhere.
    """

    def __init__(self, criteria: StoppingCriteriaList, agreement: Agreement) -> None:
        super().__init__(criteria)
        self._agreement = agreement

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        agreement = self._agreement
        if not agreement.own_stops:
            return super().__call__(input_ids, scores, **kwargs)
        error = agreement.streamer_error
        done = torch.full((input_ids.shape[0],), _FAILED, dtype=torch.int64, device=agreement.device)
        if error is None:
            try:
                done = super().__call__(input_ids, scores, **kwargs).to(agreement.device, torch.int64)
            except Exception as raised:
                error = raised
        dist.all_reduce(done, op=dist.ReduceOp.MAX, group=agreement.axis.group)
        if error is not None:
            raise error
        if bool((done == _FAILED).any()):
            raise failed_elsewhere("a stopping criterion or a streamer")
        return done.to(input_ids.device, torch.bool)


class GuardedStreamer(BaseStreamer):
    """The caller's streamer, which may be there on one rank only. What it raises is kept until the ranks next meet."""

    def __init__(self, streamer: BaseStreamer, agreement: Agreement) -> None:
        self._streamer, self._agreement = streamer, agreement

    def put(self, value: Tensor) -> None:
        self._guarded("put", value)

    def end(self) -> None:
        self._guarded("end")
        if self._agreement.streamer_error is not None:
            raise self._agreement.streamer_error

    def _guarded(self, method: str, *args: Any) -> None:
        if self._agreement.streamer_error is None:
            try:
                getattr(self._streamer, method)(*args)
            except Exception as error:
                self._agreement.streamer_error = error
