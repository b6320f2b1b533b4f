"""The losses of a batch's micro-batches: the last stage's rank tells each to all others, right after its forward."""

from __future__ import annotations

import torch
from torch import Tensor

from oslo_engine.comm.p2p import PipelineLinks


class Losses:
    """What one rank knows of the losses of one batch.

    Args:
        source: the pp rank of the last stage.
        serial: number of the batch, the same on all ranks; every message carries it.
    """

    def __init__(self, links: PipelineLinks, *, source: int, serial: int, device: torch.device) -> None:
        self._links, self._source, self._serial, self._device = links, source, serial, device
        self._known: list[Tensor | None] = []

    def __len__(self) -> int:
        """How many were told, on the source, or received, elsewhere; also those that do not exist."""
        return len(self._known)

    def tell(self, loss: Tensor | None) -> None:
        """On the source: the next micro-batch's loss; None after this rank has stopped."""
        self._links.send_loss(loss, (self._serial, len(self._known)))
        self._known.append(loss)

    def receive(self) -> None:
        """On the other ranks: wait for the next micro-batch's loss."""
        loss = self._links.receive_loss((self._serial, len(self._known)), self._source)
        self._known.append(None if loss is None else loss.to(self._device))

    def wait_for(self, index: int) -> Tensor | None:
        """A micro-batch's loss; None if the last stage has stopped."""
        while len(self._known) <= index:
            self.receive()
        return self._known[index]
