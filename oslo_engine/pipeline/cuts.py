"""What crosses the cuts between stages during one batch, from and to one rank.

Values and gradients are *left* at a cut by the stage that computed them, and *taken* by the stage on the other side; where
that one is on another rank, a send and a receive lie between. A header (shapes, dtypes, whether a gradient is wanted) goes
ahead of the first values of each signature in a batch; after that both sides know it. It is sent anew in every batch:
parameters may have been frozen, or the mode changed.

A rank that has stopped in the middle of a batch sends *nothing*, in a form that its neighbours can receive: zeros where they
expect values of known shapes, and otherwise a header that says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.comm.p2p import Incoming, PipelineLinks, TensorMeta
from oslo_engine.errors import PipelineError
from oslo_engine.pipeline.micro_batch import MicroBatch
from oslo_engine.pipeline.orders import Orders

_Metas = tuple[TensorMeta, ...] | None
_At = tuple[int, int]  # stage after the cut, micro-batch


class Cuts:
    """The traffic of one rank in one batch. A stage in an argument is the one on this rank.

    Args:
        batch: numbers that identify the batch, the same on all ranks; every header carries them.
    """

    def __init__(self, links: PipelineLinks, orders: Orders, device: torch.device, batch: tuple[int, ...]) -> None:
        self._links, self._orders, self._device, self._batch = links, orders, device, batch
        self._empty = False
        self._metas: dict[tuple[int, Any], _Metas] = {}  # by stage after the cut and signature; None: no values come
        self._left_values: dict[_At, tuple[Tensor, ...]] = {}
        self._left_gradients: dict[_At, tuple[Tensor, ...]] = {}
        self._coming_values: dict[_At, Incoming | None] = {}
        self._coming_gradients: dict[_At, Incoming | None] = {}

    def stop(self) -> None:
        """From here on this rank sends nothing, and discards what it receives."""
        self._empty = True
        self._left_values.clear()
        self._left_gradients.clear()

    # Forward

    def leave_values(self, stage: int, micro: MicroBatch, values: tuple[Tensor, ...]) -> None:
        self._left_values[stage + 1, micro.index] = values

    def send_values(self, stage: int, micro: MicroBatch) -> None:
        """Send what the stage has left for the next one.

        Raises:
            PipelineError: shapes or dtypes differ from an earlier micro-batch of the same signature.
        """
        peer, key = self._orders.rank_of_stage[stage + 1], (stage + 1, micro.signature)
        values = None if self._empty else self._left_values.pop((stage + 1, micro.index))
        metas: _Metas = None if values is None else tuple(TensorMeta.of(value) for value in values)
        if key not in self._metas:
            self._links.send_header(metas, self._mark(stage + 1, micro), peer)
            self._metas[key] = metas
        known = self._metas[key]
        if known is None:
            return
        if values is None:
            values = self._nothing(known)
        elif metas != known:
            raise PipelineError(
                "the values that cross a cut differ between micro-batches of the same shapes",
                where=f"from stage {stage} to stage {stage + 1}, micro-batch {micro.index}",
                expected=str(known),
                got=str(metas),
                hint="shapes inside the model must depend on the shapes of its inputs only (turn off unpadding)",
            )
        self._links.send("forward", values, peer)

    def receive_values(self, stage: int, micro: MicroBatch) -> None:
        """Start receiving what the stage before has left."""
        peer, key = self._orders.rank_of_stage[stage - 1], (stage, micro.signature)
        if key not in self._metas:
            self._metas[key] = self._links.receive_header(self._mark(stage, micro), peer)
        known = self._metas[key]
        coming = None if known is None else self._links.receive("forward", known, peer, self._device)
        self._coming_values[stage, micro.index] = coming

    def take_values(self, stage: int, micro: MicroBatch) -> tuple[Tensor, ...] | None:
        """What the stage before has left, as leaves that require grad where its values do; None if its rank has stopped."""
        if stage == 0:
            return ()
        at, with_grad = (stage, micro.index), torch.is_grad_enabled()
        if self._is_local(stage - 1):
            return tuple(v.detach().requires_grad_(v.requires_grad and with_grad) for v in self._left_values.pop(at))
        coming, known = self._coming_values.pop(at), self._metas[stage, micro.signature]
        if coming is None or known is None:
            return None
        return tuple(v.requires_grad_(meta.requires_grad and with_grad) for v, meta in zip(coming.wait(), known, strict=True))

    # Backward

    def leave_gradients(self, stage: int, micro: MicroBatch, gradients: tuple[Tensor, ...]) -> None:
        """Gradients of those values the stage took that require grad."""
        self._left_gradients[stage, micro.index] = gradients

    def send_gradients(self, stage: int, micro: MicroBatch) -> None:
        """Send what the stage has left for the one before."""
        wanted = self._wanted(stage, micro)
        gradients = self._nothing(wanted) if self._empty else self._left_gradients.pop((stage, micro.index))
        self._links.send("backward", gradients, self._orders.rank_of_stage[stage - 1])

    def receive_gradients(self, stage: int, micro: MicroBatch) -> None:
        """Start receiving what the next stage has left."""
        wanted, peer = self._wanted(stage + 1, micro), self._orders.rank_of_stage[stage + 1]
        self._coming_gradients[stage + 1, micro.index] = self._links.receive("backward", wanted, peer, self._device)

    def take_gradients(self, stage: int, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Gradients of those values the stage left that require grad."""
        at = stage + 1, micro.index
        if self._is_local(stage + 1):
            return self._left_gradients.pop(at)
        coming = self._coming_gradients.pop(at)
        return () if coming is None else coming.wait()

    def discard(self, stage: int, micro: MicroBatch) -> None:
        """Receive what is on its way to a stage that will not run any more."""
        for coming in (
            self._coming_values.pop((stage, micro.index), None),
            self._coming_gradients.pop((stage + 1, micro.index), None),
        ):
            if coming is not None:
                coming.wait()

    def _is_local(self, stage: int) -> bool:
        return self._orders.rank_of_stage[stage] == self._links.axis.rank

    def _wanted(self, stage: int, micro: MicroBatch) -> tuple[TensorMeta, ...]:
        return tuple(meta for meta in self._metas[stage, micro.signature] or () if meta.requires_grad)

    def _nothing(self, metas: tuple[TensorMeta, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(meta.shape, dtype=meta.dtype, device=self._device) for meta in metas)

    def _mark(self, stage: int, micro: MicroBatch) -> tuple[int, ...]:
        return *self._batch, stage, micro.index
