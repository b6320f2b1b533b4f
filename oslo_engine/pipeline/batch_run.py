"""One batch on one rank: walking its list of actions.

A rank that stops in the middle of a batch, for whatever reason, would leave the others waiting. So it walks the rest of its
list *empty*: it computes nothing, sends nothing in a form that its neighbours can receive, and receives what they send. At the
end of every batch all ranks exchange how it went; only if it went well everywhere do gradients reach the parameters. So an
exception on one rank becomes an error of this batch on all of them, and the next batch starts clean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from oslo_engine.comm.calls import Calls
from oslo_engine.comm.p2p import Outcome, PipelineLinks
from oslo_engine.comm.same_batch import apart
from oslo_engine.errors import BatchError, OsloError, PipelineError
from oslo_engine.layers.deferred import WeightGradient, collect_weight_gradients, deferrable
from oslo_engine.pipeline.accumulate import GradientBuffer
from oslo_engine.pipeline.autocast import AutocastState
from oslo_engine.pipeline.cuts import Cuts
from oslo_engine.pipeline.losses import Losses
from oslo_engine.pipeline.micro_batch import MicroBatch, fingerprint
from oslo_engine.pipeline.orders import Action, ActionKind, Orders
from oslo_engine.pipeline.stage_program import StageProgram
from oslo_engine.pipeline.timeline import Event, noted
from oslo_engine.pipeline.turns import Turns


class _PeerStopped(Exception):
    """Another rank has announced that it sends nothing any more."""


class _Flight(NamedTuple):
    """A stage and micro-batch between its forward and its backward."""

    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]


class BatchRun:
    """Executes one rank's actions for one batch.

    Args:
        training: whether backwards follow; they need a loss from the last stage.
        keep_outputs: keep what the last stage returns, detached, in ``outputs`` (by micro-batch).
        timeline: where to note what was computed when; None: nowhere.
        turns: other runs go on before this one ends, if there are any.
        calls: a training batch is one of them; anything else is a part of one.
    """

    def __init__(
        self,
        program: StageProgram,
        links: PipelineLinks,
        orders: Orders,
        micros: Sequence[MicroBatch],
        *,
        device: torch.device,
        serial: int,
        training: bool,
        keep_outputs: bool,
        autocast: AutocastState,
        timeline: list[Event] | None = None,
        turns: Turns | None = None,
        calls: Calls,
    ) -> None:
        self.actions = orders.actions[links.axis.rank]
        self.micros, self.position, self.closed = micros, 0, False
        self.outputs: dict[int, Any] = {}
        self.loss_gradients: dict[int, Tensor] = {}  # what the user's backward starts with; 1 where missing
        self._program, self._links, self._orders, self._device, self._serial = program, links, orders, device, serial
        self._training, self._keep_outputs, self._autocast, self._timeline = training, keep_outputs, autocast, timeline
        self._turns, self._calls = turns, calls
        self._cuts = Cuts(links, orders, device, (serial, len(micros)))
        self._fingerprint = fingerprint(micros) if training else None
        self._empty = False
        self._sharded = program.fully_sharded() if training else None
        if self._sharded is not None:
            self._sharded.begin()
        self._parameters = program.parameters() if training else []
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._sums = GradientBuffer(len(self._parameters))
        self._losses = Losses(links, source=orders.rank_of_stage[-1], serial=serial, device=device)
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._queues: dict[tuple[int, int], list[WeightGradient]] = {}
        zero_bubble = any(action.kind is ActionKind.BACKWARD_WEIGHT for action in self.actions)
        self._preparing: Callable[[], AbstractContextManager[None]] = deferrable if zero_bubble else nullcontext
        if training:
            calls.begin("a training batch", "outside")

    # What the drivers call

    def advance(self, stop: int) -> None:
        """Execute the actions before index ``stop``.

        Raises:
            PipelineError: another rank has stopped, or does not answer.
            Exception: what a stage of this rank raised.
        """
        with self._ending_on_failure():
            self._walk(stop)

    def loss(self, index: int) -> Tensor:
        """The weighted loss of a micro-batch, detached, as every rank sees it. Waits for the last stage."""
        with self._ending_on_failure():
            loss = self._losses.wait_for(index)
            if loss is None:
                raise _PeerStopped
        return loss

    def finish(self) -> None:
        """Close a batch whose actions are all executed.

        Raises:
            PipelineError: some rank has stopped in the middle of it.

        Communication: see ``PipelineLinks.agree``.
        """
        with self._ending_on_failure():
            assert self.position == len(self.actions), "actions are left"
            outcome = self._settle(None)
        _raise_what_went_wrong(outcome, self._serial)

    def abandon(self, problem: str) -> None:
        """Leave the batch; nothing of it reaches the parameters. Does nothing once the batch is closed."""
        if not self.closed:
            self._calls.fail(problem)
            self._end(problem)

    def take_gradients(self) -> list[Tensor | None]:
        """The gradients of the batch, for ``program.parameters()`` in their order; none where FSDP2 was given them."""
        if self._sharded is None:
            return self._program.finish_gradients(self._sums.take())
        self._sharded.deliver(self._program.finish_gradients(self._sharded.take()))
        return []

    # Leaving early

    @contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        if self.closed:
            raise PipelineError("this batch has been left already", hint="call the model again")
        try:
            with self._calls.stretch():
                yield
        except _PeerStopped:
            self._calls.fail()
            _raise_what_went_wrong(self._end(None), self._serial)
        except Exception as error:
            self._calls.fail(error)
            outcome = self._end(_describe(error))
            if outcome is not None and len(set(outcome.fingerprints)) > 1:
                error.add_note("The ranks of the pipeline were given different batches.")
            raise
        except BaseException as error:  # an interrupt: do not wait for anybody any more
            self.closed = True
            self._links.give_up(f"interrupted by {type(error).__name__}")
            self._calls.fail(f"interrupted by {type(error).__name__}")
            raise

    def _end(self, problem: str | None) -> Outcome | None:
        """Walk the rest empty, beginning with the action that failed, and close the batch. None: the others do not answer."""
        self._empty = True
        self._cuts.stop()
        self._flights.clear()
        self._queues.clear()
        self.outputs.clear()
        self._sums.take()
        if self._sharded is not None:
            self._sharded.discard()
        try:
            self._walk(len(self.actions))
            while self._training and len(self._losses) < len(self.micros):
                self._losses.receive()
            return self._settle(problem)
        except PipelineError:
            if self._links.failure is None:
                raise
            return None  # the links refuse their next use with the reason; what happened before matters more here
        finally:
            self.closed = True

    def _settle(self, problem: str | None) -> Outcome:
        if self._turns is None:
            self._links.wait_for_sends()
        else:  # what other runs send meanwhile is received after they have met the others, so it is not waited for here
            sent = self._links.take_sends()
            self._turns.stop_at("end")
        outcome = self._links.agree(self._serial, 0 if self._fingerprint is None else int(self._fingerprint), problem)
        if self._turns is not None:
            for work, _ in sent:  # it has been received: all ranks have walked to the end
                work.wait()
        self.closed = True
        if len(set(outcome.fingerprints)) > 1 or outcome.problems:
            self._calls.fail()
        elif self._training:
            self._calls.end()
        return outcome

    # Actions

    def _walk(self, stop: int) -> None:
        while self.position < stop:
            action = self.actions[self.position]
            self._execute(action, self.micros[action.micro])
            self.position += 1

    def _execute(self, action: Action, micro: MicroBatch) -> None:
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action, micro)
            case ActionKind.BACKWARD:
                self._backward(action, micro)
            case ActionKind.BACKWARD_INPUT:
                self._backward_input(action, micro)
            case ActionKind.BACKWARD_WEIGHT:
                self._backward_weight(action, micro)
            case ActionKind.SEND_FORWARD:
                self._cuts.send_values(action.stage, micro)
            case ActionKind.RECEIVE_FORWARD:
                self._cuts.receive_values(action.stage, micro)
            case ActionKind.SEND_BACKWARD:
                self._cuts.send_gradients(action.stage, micro)
            case ActionKind.RECEIVE_BACKWARD:
                self._cuts.receive_gradients(action.stage, micro)

    def _forward(self, action: Action, micro: MicroBatch) -> None:
        stage, last = action.stage, action.stage == self._orders.num_stages - 1
        if self._empty:
            self._cuts.discard(stage, micro)
            if last and self._training and len(self._losses) == micro.index:
                self._losses.tell(None)
            return
        with torch.set_grad_enabled(self._training):
            received = self._cuts.take_values(stage, micro)
            if received is None:
                raise _PeerStopped
            with self._autocast.applied(), self._preparing(), self._timed(action):
                result = self._program.run(stage, received, micro)
            if last:
                self._end_of_model(received, result, micro)
                return
        self._cuts.leave_values(stage, micro, result)
        if self._training:
            self._flights[stage, micro.index] = _Flight(received, result)

    def _end_of_model(self, received: tuple[Tensor, ...], result: Any, micro: MicroBatch) -> None:
        if self._keep_outputs:
            self.outputs[micro.index] = pytree.tree_map_only(Tensor, Tensor.detach, result)
        if not self._training:
            return
        loss = getattr(result, "loss", None)
        if loss is None:
            raise PipelineError("the model returned no loss", expected="an output with .loss", got=type(result).__name__)
        # Without a label the mean over labels is not a number, and neither is its gradient: such a micro-batch takes no part.
        weighted = loss * micro.weight if micro.weight else torch.zeros_like(loss.detach())
        stage = self._orders.num_stages - 1
        self._flights[stage, micro.index] = _Flight(received, (weighted,))
        self._losses.tell(weighted.detach())

    def _backward(self, action: Action, micro: MicroBatch) -> None:
        if self._empty:
            self._cuts.discard(action.stage, micro)
            return
        flight = self._flights.pop((action.stage, micro.index))
        outputs = [value for value in flight.sent if value.requires_grad]
        gradients = self._gradients_of(action.stage, micro, outputs)
        wanted = [value for value in flight.received if value.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if outputs and (self._parameters or wanted):
            with self._autocast.off(), self._timed(action):
                found = self._differentiate(outputs, gradients, wanted, last=micro.index == len(self.micros) - 1)
        if action.stage > 0:
            back = zip(wanted, found, strict=True)
            filled = [torch.zeros_like(value) if gradient is None else gradient for value, gradient in back]
            self._cuts.leave_gradients(action.stage, micro, tuple(filled))

    def _differentiate(
        self, outputs: list[Tensor], gradients: tuple[Tensor, ...], wanted: list[Tensor], *, last: bool
    ) -> Sequence[Tensor | None]:
        """Add the gradients of the parameters to this batch's sums, and return those of ``wanted``."""
        if self._sharded is not None:
            return self._sharded.backward(outputs, gradients, wanted, last=last)
        found = torch.autograd.grad(outputs, [*self._parameters, *wanted], gradients, allow_unused=True)
        self._sums.add_all(found[: len(self._parameters)])
        return found[len(self._parameters) :]

    def _gradients_of(self, stage: int, micro: MicroBatch, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if stage < self._orders.num_stages - 1:
            return self._cuts.take_gradients(stage, micro)
        given = self.loss_gradients.get(micro.index)
        return tuple(torch.ones_like(loss) if given is None else given.to(loss.dtype).view_as(loss) for loss in outputs)

    def _backward_input(self, action: Action, micro: MicroBatch) -> None:
        with collect_weight_gradients() as queue:
            self._backward(action, micro)
        self._queues[action.stage, micro.index] = queue

    def _backward_weight(self, action: Action, micro: MicroBatch) -> None:
        if self._empty:
            return
        queue = self._queues.pop((action.stage, micro.index))
        with self._autocast.off(), self._timed(action):
            while queue:
                entry = queue.pop()  # its tensors can be freed after this
                index = self._index.get(id(entry.weight))
                assert index is not None, "a weight whose gradient was put off is not among the program's parameters"
                self._sums.add(index, entry.compute())

    def _timed(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext() if self._timeline is None else noted(action, self._timeline, self._device)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error.what if isinstance(error, OsloError) else error}"


def _raise_what_went_wrong(outcome: Outcome | None, number: int) -> None:
    problems = {} if outcome is None else outcome.problems
    if outcome is not None and len(set(outcome.fingerprints)) > 1:
        raise BatchError(
            "the ranks of a pipeline were given different batches",
            where=f"batch {number} of this model",
            expected="the same batch on every rank that holds a part of one copy of the model",
            got="; ".join(problems.values())
            or f"other values {apart(outcome.fingerprints, range(len(outcome.fingerprints)), 'pp rank')}",
            hint="give samplers num_replicas=model.mpu.get_data_parallel_world_size(), rank=model.mpu.get_data_parallel_rank()",
        ) from None
    if outcome is None or problems:
        raise PipelineError(
            "another rank of the pipeline stopped in the middle of this batch",
            where=", ".join(f"pp rank {rank}" for rank in problems) or None,
            got="; ".join(problems.values()) or None,
            hint="the gradients of this batch are discarded on every rank; the next batch can run",
        ) from None
