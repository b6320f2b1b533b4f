"""The two ways of driving a training batch: ``train_step``, and the user's own loop over micro-batches.

    for micro in model(**batch):        # a PipelineLoop
        micro.loss.backward()

Both walk the same list of actions. Taking micro-batch i from the loop executes everything up to the first backward of i, and
waits for its loss; ``micro.loss.backward()`` executes the backwards that follow, and the last one everything that is left. So
the loop overlaps micro-batches exactly as the schedule does.

The autograd graph that the user, DDP or DeepSpeed see:

    parameters --_Deliver--> anchor (in the dict that the model returns) --_Loss--> loss of the last micro-batch
                             leaf -------------------------------------- _Loss--> loss of any other one

``_Loss.backward`` runs stages by hand with ``torch.autograd.grad``, which calls no hook of a parameter. Gradients reach the
parameters once per batch, through the anchor, so every hook on them fires exactly once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from oslo_engine.errors import PipelineError
from oslo_engine.pipeline.autocast import AutocastState
from oslo_engine.pipeline.batch_run import BatchRun
from oslo_engine.pipeline.micro_batch import MicroBatch
from oslo_engine.pipeline.orders import first_backwards, next_forward
from oslo_engine.pipeline.runtime import PipelineRuntime


def train_step(runtime: PipelineRuntime, micros: Sequence[MicroBatch]) -> Tensor:
    """Run a training batch from beginning to end and add its gradients to ``parameter.grad``.

    Returns:
        The batch's loss, detached, the same on every rank.

    Raises:
        BatchError: the schedule cannot take this number of micro-batches.
        PipelineError: a loop is open, or another rank has stopped; no gradient is added on any rank.
    """
    run = runtime.begin(micros, autocast=AutocastState.capture(runtime.device))
    run.advance(len(run.actions))
    losses = [run.loss(index) for index in range(len(micros))]
    run.finish()
    with torch.enable_grad():
        anchor = _deliver(runtime, run)
    anchor.backward()
    return torch.stack(losses).sum()


def open_loop(runtime: PipelineRuntime, micros: Sequence[MicroBatch]) -> PipelineLoop:
    """What the model returns in a training forward. Nothing is computed until it is iterated.

    Raises:
        BatchError: the schedule cannot take this number of micro-batches.
        PipelineError: another loop is open.
    """
    runtime.check(micros)
    runtime.refuse_open_loop()
    driver = LoopDriver(runtime, micros)
    return PipelineLoop({PipelineLoop.ANCHOR: _deliver(runtime, driver), PipelineLoop.DRIVER: driver})


@dataclass(frozen=True)
class MicroOutput:
    """One micro-batch, ready for its backward.

    loss: weighted by its share of the batch's labels, the same value on every rank; call ``backward()`` on it, or on what it is
        scaled to, before taking the next micro-batch.
    index: number of the micro-batch.
    outputs: what the model returned for it, detached and with the loss not weighted, on the last stage's rank; None elsewhere.
    """

    loss: Tensor
    index: int
    outputs: Any = None


class PipelineLoop(dict[str, Any]):
    """A training forward of a pipeline: iterate over it, once, and call ``backward()`` on every micro-batch's loss.

    It is a dict so that wrappers which look for tensors in a model's output (DDP, DeepSpeed, Accelerate) find its one tensor,
    the anchor, and may replace it; its two items are all it consists of.
    """

    ANCHOR, DRIVER = "anchor", "driver"

    def __iter__(self) -> Iterator[MicroOutput]:  # type: ignore[override]
        return self[self.DRIVER].iterate(self[self.ANCHOR])

    def __len__(self) -> int:
        """The number of micro-batches."""
        return len(self[self.DRIVER].micros)

    @property
    def loss(self) -> Tensor:
        return self["loss"]

    def __missing__(self, key: str) -> Any:
        if key != "loss":
            raise KeyError(key)
        raise PipelineError(
            "under pipeline parallelism a training forward returns micro-batches, not one loss",
            hint="write: for micro in model(**batch): micro.loss.backward()    or: loss = model.train_step(batch)",
        )

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


class LoopDriver:
    """The state of one user-driven batch."""

    def __init__(self, runtime: PipelineRuntime, micros: Sequence[MicroBatch]) -> None:
        self._runtime, self.micros = runtime, micros
        self._autocast = AutocastState.capture(runtime.device)
        self._run: BatchRun | None = None
        self._starts: dict[int, int] = {}  # index of the first backward, by micro-batch
        self._iterated = self._finished = False
        self._num_backwards = 0  # of micro-batches 0, 1, ...: the next one is not handed out before

    def iterate(self, anchor: Tensor) -> Iterator[MicroOutput]:
        if self._iterated:
            raise self._misuse("a pipeline batch was iterated twice", "call the model again for another pass")
        self._iterated = True
        return self._iterate(anchor)

    def _iterate(self, anchor: Tensor) -> Iterator[MicroOutput]:
        self._run = run = self._runtime.begin(self.micros, autocast=self._autocast, keep_outputs=True)
        self._runtime.open_loop = self
        self._starts = first_backwards(run.actions)
        last = len(self.micros) - 1
        try:
            for index in range(len(self.micros)):
                run.advance(self._starts[index])
                loss = run.loss(index)
                with torch.enable_grad():
                    link = anchor if index == last else torch.zeros((), device=loss.device, requires_grad=True)
                    loss = _Loss.apply(self, index, loss, link)
                if self._runtime.before_backward is not None:
                    self._runtime.before_backward(last=index == last)
                yield MicroOutput(loss, index, run.outputs.pop(index, None))
                if run.closed and not self._finished:
                    raise self._misuse("the micro-batch loop goes on after its batch was left", None)
                if self._num_backwards <= index:
                    raise self._misuse(f"micro-batch {index} was left without a backward", "call it on micro.loss in the loop")
        finally:
            self._leave(run)

    def backward(self, index: int, gradient: Tensor) -> None:
        """What ``micro.loss.backward()`` does."""
        run = self._run
        assert run is not None
        if run.closed and not self._finished:
            raise self._misuse(f"backward of micro-batch {index} after its batch was left", None)
        if index < self._num_backwards:
            raise self._misuse(f"backward of micro-batch {index} was called twice", "one backward for each micro-batch")
        run.loss_gradients[index] = gradient
        self._num_backwards = index + 1
        if index < len(self.micros) - 1:
            # Forwards are left to the taking of the next micro-batch: there they run outside of autograd's backward.
            run.advance(min(next_forward(run.actions, self._starts[index]), self._starts[index + 1]))
        else:
            run.advance(len(run.actions))
            run.finish()
            self._finished = True
            self._close()

    def take_gradients(self) -> list[Tensor | None]:
        assert self._run is not None
        return self._run.take_gradients()

    def abandon(self, problem: str) -> None:
        """Leave the batch on this rank, telling the others; its gradients are discarded."""
        if self._run is not None:
            self._run.abandon(problem)
        self._close()

    def _misuse(self, what: str, hint: str | None) -> PipelineError:
        self.abandon(what)
        return PipelineError(
            what,
            expected="for micro in model(**batch): micro.loss.backward()",
            hint=hint or "the batch has been abandoned and its gradients discarded; call the model again",
        )

    def _leave(self, run: BatchRun) -> None:
        """The loop is over: at its end, by an error, or because the user's body broke out of it."""
        if not run.closed:
            done, total = self._num_backwards, len(self.micros)
            self.abandon(f"the micro-batch loop was left after {done} of {total} backwards")
            warnings.warn(
                f"the micro-batch loop was left after {done} of {total} backwards: the gradients of this batch are discarded",
                stacklevel=3,
            )
        self._close()

    def _close(self) -> None:
        if self._runtime.open_loop is self:
            self._runtime.open_loop = None


def _deliver(runtime: PipelineRuntime, source: BatchRun | LoopDriver) -> Tensor:
    """The anchor: a zero whose backward gives ``source``'s gradients to the parameters."""
    leaf = torch.zeros((), device=runtime.device, requires_grad=True)  # a rank may have no trainable parameter
    parameters = runtime.program.parameters() if runtime.program.fully_sharded() is None else []
    return _Deliver.apply(source, leaf, *parameters)


class _Deliver(Function):
    @staticmethod
    def forward(ctx: Any, source: BatchRun | LoopDriver, leaf: Tensor, *parameters: Tensor) -> Tensor:
        ctx.source = source
        return torch.zeros_like(leaf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.source.take_gradients()


class _Loss(Function):
    @staticmethod
    def forward(ctx: Any, driver: LoopDriver, index: int, value: Tensor, link: Tensor) -> Tensor:
        ctx.driver, ctx.index, ctx.device = driver, index, link.device
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ctx.driver.backward(ctx.index, gradient)
        return None, None, None, torch.zeros((), device=ctx.device)


def _flatten(loop: PipelineLoop) -> tuple[list[Any], Any]:
    return [loop[PipelineLoop.ANCHOR]], loop[PipelineLoop.DRIVER]


def _unflatten(values: Any, driver: Any) -> PipelineLoop:
    return PipelineLoop({PipelineLoop.ANCHOR: next(iter(values)), PipelineLoop.DRIVER: driver})


pytree.register_pytree_node(PipelineLoop, _flatten, _unflatten)
