"""One rank decides how ``generate`` goes on, and all ranks that hold the model do the same.

``generate`` runs on every rank. Ranks that each took their own argmax would part ways at a near-tie, ranks of earlier pipeline
stages hold no scores at all, and a rank that stopped alone would leave the others waiting. So the deciding rank (tp rank 0 of
the last stage) tells the others its choice of tokens; a stop on any rank stops all; and what one rank raises in the caller's
own code (processors, criteria, streamers) becomes an error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_engine.comm.collectives import Axis
from oslo_engine.errors import PipelineError
from oslo_engine.generation.heads import Heads

Made = TypeVar("Made")


@dataclass
class Agreement:
    """Of one ``generate``.

    axis: the ranks that hold one copy of the model (tp and pp). source: which of them decides. device: of what travels.
    own_processors, own_stops: whether any rank's caller gave logits processors; stopping criteria or a streamer. Only then do
        the ranks tell each other, at every step, whether all is well and whether to stop.
    assisted: whether tokens are proposed first and checked then.
    several_stages: whether there are ranks without logits.
    heads: where those hold slices of the vocabulary, and the caller does not need whole logits on every rank.
    scores: in sampling, where the caller wants them, those of every step as the deciding rank had them.
    """

    axis: Axis
    source: int
    device: torch.device
    own_processors: bool = False
    own_stops: bool = False
    assisted: bool = False
    several_stages: bool = False
    heads: Heads | None = None
    scores: list[Tensor] = field(default_factory=list)
    streamer_error: Exception | None = None

    @classmethod
    def begin(
        cls, axis: Axis, source: int, device: torch.device, *, own_processors: bool, own_stops: bool, assisted: bool
    ) -> Agreement:
        """Args: as of this rank's caller.

        Communication: one all-reduce of two numbers over the axis.
        """
        flags = torch.tensor([int(own_processors), int(own_stops)], device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=axis.group)
        processors, stops = (bool(flag) for flag in flags.tolist())
        return cls(axis, source, device, processors, stops, assisted)

    @property
    def decides(self) -> bool:
        return self.axis.rank == self.source

    def tell(self, tensor: Tensor) -> Tensor:
        """The deciding rank's tensor, in place; on the other ranks one of the same shape and type is overwritten."""
        dist.broadcast(tensor, group=self.axis.group, group_src=self.source)
        return tensor

    def run_own_processors(self, run: Callable[[], Made], otherwise: Made) -> Made:
        """What ``run`` returns. If it raises on any rank, all raise.

        Communication: where any rank has processors of its own, one all-reduce of a number.
        """
        if not self.own_processors:
            return run()
        result, error = otherwise, None
        try:
            result = run()
        except Exception as raised:
            error = raised
        self._all_or_none(error, "a logits processor")
        return result

    def _all_or_none(self, error: Exception | None, what: str) -> None:
        failed = torch.tensor(int(error is not None), device=self.device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.axis.group)
        if error is not None:
            raise error
        if int(failed):
            raise failed_elsewhere(what)


def failed_elsewhere(what: str) -> PipelineError:
    return PipelineError(
        f"{what} failed on another rank", hint="its traceback is on that rank; the model can be used again on all of them"
    )
