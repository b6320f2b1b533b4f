"""What the runtime needs of a model."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from oslo_engine.pipeline.fully_sharded import FullyShardedGradients
from oslo_engine.pipeline.micro_batch import MicroBatch


class StageProgram(Protocol):
    """The virtual stages that one rank holds."""

    num_stages: int

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters on this rank, each once, in an order that does not change during a batch."""

    def fully_sharded(self) -> FullyShardedGradients | None:
        """What runs the backwards of a batch, where FSDP2 has divided the parameters."""

    def run(self, stage: int, received: tuple[Tensor, ...], micro: MicroBatch) -> tuple[Tensor, ...] | Any:
        """The forward of one stage on one micro-batch, under the ambient grad mode and autocast.

        Args:
            received: what stage - 1 returned, in its order; () at stage 0. Those that require grad are leaves.

        Returns:
            The values for stage + 1; the last stage the model's output, which in training has a scalar ``loss`` (not weighted).
        """

    def finish_gradients(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Sum the gradients of parameters that several ranks hold. Called once per batch on every rank, after all backwards.

        Args:
            gradients: one per parameter, of its shape, owned by nobody else; None where no micro-batch used it.

        Communication: over the pp axis, whatever the program needs.
        """
