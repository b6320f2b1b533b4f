"""The pipeline of one rank: runs batches, forward only or in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from oslo_engine.comm.calls import Calls
from oslo_engine.comm.p2p import PipelineLinks
from oslo_engine.errors import PipelineError
from oslo_engine.pipeline.autocast import AutocastState
from oslo_engine.pipeline.batch_run import BatchRun
from oslo_engine.pipeline.micro_batch import MicroBatch
from oslo_engine.pipeline.orders import forward_orders, num_stages, schedule_orders
from oslo_engine.pipeline.stage_program import StageProgram
from oslo_engine.pipeline.timeline import Event
from oslo_engine.pipeline.turns import Turns


class OpenLoop(Protocol):
    """A micro-batch loop that is being iterated."""

    def abandon(self, problem: str) -> None: ...


class BeforeBackward(Protocol):
    """Hears of the backwards of a micro-batch loop."""

    def __call__(self, *, last: bool) -> None:
        """The user is about to call a micro-batch's backward; ``last``: gradients reach the parameters in this one."""


class PipelineRuntime:
    """What one rank needs to run batches through the pipeline.

    Every rank of the pipeline must make the same calls, with the same micro-batches.

    Args:
        program: the stages of this rank, cut for ``schedule``.
        links: connections to the other ranks.
        device: where the program computes.
        calls: of this rank; by default none that anybody looks at.

    Attributes:
        timeline: set it to a list to have every computation noted in it; on an accelerator that waits for each one.
        open_loop: the loop that is being iterated, if any.
        before_backward: told of every micro-batch that a loop hands out, where a wrapper of the model has to know.
        turns: of several runs that share this rank, if that is how it is driven.
    """

    def __init__(
        self,
        program: StageProgram,
        links: PipelineLinks,
        *,
        schedule: str,
        device: torch.device,
        calls: Calls | None = None,
    ) -> None:
        expected = num_stages(schedule, links.axis.size)
        assert program.num_stages == expected, f"{schedule} has {expected} stages, the program {program.num_stages}"
        self.program, self.links, self.schedule, self.device = program, links, schedule, device
        self.timeline: list[Event] | None = None
        self.open_loop: OpenLoop | None = None
        self.before_backward: BeforeBackward | None = None
        self.turns: Turns | None = None
        self._calls = Calls() if calls is None else calls
        self._num_batches = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineRuntime:
        raise PipelineError("a pipeline cannot be copied", hint="copy the model before it is parallelized")

    def check(self, micros: Sequence[MicroBatch]) -> None:
        """Raises BatchError if the schedule cannot train on this number of micro-batches."""
        schedule_orders(self.schedule, self.links.axis.size, len(micros))

    def begin(self, micros: Sequence[MicroBatch], *, autocast: AutocastState, keep_outputs: bool = False) -> BatchRun:
        """Start a training batch. Raises PipelineError while a loop is open."""
        self.refuse_open_loop()
        orders = schedule_orders(self.schedule, self.links.axis.size, len(micros))
        return self._run(micros, orders=orders, training=True, keep_outputs=keep_outputs, autocast=autocast)

    def evaluate(self, micros: Sequence[MicroBatch]) -> list[Any] | None:
        """Run forwards only, without gradients; any number of micro-batches.

        Returns:
            What the last stage returned for each micro-batch, on its rank; None on the others.

        Raises:
            PipelineError: a loop is open (it is abandoned), or a rank has stopped.
        """
        self.refuse_open_loop()
        orders = forward_orders(self.schedule, self.links.axis.size, len(micros))
        autocast = AutocastState.capture(self.device)
        if self.turns is not None:
            self.turns.stop_at("forward")
        run = self._run(micros, orders=orders, training=False, keep_outputs=True, autocast=autocast)
        run.advance(len(run.actions))
        run.finish()
        return [run.outputs[micro.index] for micro in micros] if self.has_last_stage else None

    @property
    def has_last_stage(self) -> bool:
        orders = forward_orders(self.schedule, self.links.axis.size, 1)
        return orders.rank_of_stage[-1] == self.links.axis.rank

    def _run(self, micros: Sequence[MicroBatch], **settings: Any) -> BatchRun:
        self._num_batches += 1
        return BatchRun(
            self.program,
            self.links,
            micros=micros,
            device=self.device,
            serial=self._num_batches,
            timeline=self.timeline,
            turns=self.turns,
            calls=self._calls,
            **settings,
        )

    def refuse_open_loop(self) -> None:
        """Raises PipelineError while a loop is open, after abandoning it, so that the next call can run."""
        if self.open_loop is not None:
            self.open_loop.abandon("the model was called while a micro-batch loop was open")
            raise PipelineError(
                "the model was called while a micro-batch loop is open",
                expected="every micro-batch's loss.backward() before the next call",
                hint="the loop has been abandoned and its gradients discarded; evaluate or start a new batch after the loop",
            )
