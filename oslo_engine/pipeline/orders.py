"""In which order every pipeline rank computes and communicates: torch.distributed.pipelining's schedules, as plain data.

A model is cut into *virtual stages* 0 .. num_stages - 1; a rank holds one (gpipe, 1f1b) or two of them. An order is a list of
actions, written ``<stage><kind><micro-batch>`` as torch does. For ``1f1b`` with two stages and two micro-batches:

    rank 0:  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1:  1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1

The sends and receives between any two ranks stand in the same order in both lists, and executing every list from left to right
cannot deadlock, even where a send waits for its receive. Values between two stages of one rank are not sent.

torch's schedule classes are private in part; this file is the only one that touches them. Pure: no process group, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from oslo_engine.errors import BatchError, PlanError, UnsupportedError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v")
_SCHEDULE_CLASSES = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zero-bubble-v": "ScheduleZBVZeroBubble",
}
_IN_ROUNDS = ("interleaved", "zero-bubble")


class ActionKind(StrEnum):
    """What a rank does; the values are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"

    @property
    def starts_backward(self) -> bool:
        """The gradients of what the stage sends are needed here."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


class Action(NamedTuple):
    """One entry of an order. ``stage`` is where it happens: a RECEIVE_FORWARD of stage 2 takes what stage 1 has sent."""

    stage: int
    kind: ActionKind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True)
class Orders:
    """What every rank does for one batch.

    actions: one list per pp rank.
    rank_of_stage: the pp rank that holds each virtual stage.
    """

    actions: tuple[tuple[Action, ...], ...]
    rank_of_stage: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)


def num_stages(schedule: str, pp: int) -> int:
    """How many virtual stages the model is cut into."""
    return len(rank_of_stage(schedule, pp))


def rank_of_stage(schedule: str, pp: int) -> tuple[int, ...]:
    """The pp rank of every virtual stage: ``0 1 2`` | ``0 1 2 0 1 2`` (interleaved) | ``0 1 2 2 1 0`` (zero-bubble-v)."""
    _check_name(schedule)
    there = tuple(range(pp))
    if schedule not in _SCHEDULE_CLASSES:
        return there
    return there + (there[::-1] if schedule == "zero-bubble-v" else there)


@lru_cache(maxsize=256)
def schedule_orders(schedule: str, pp: int, num_micro_batches: int) -> Orders:
    """The order of one training batch.

    Raises:
        BatchError: fewer micro-batches than pipeline ranks, or a number the schedule cannot take (some that it can are named).
        PlanError: no such schedule.
        UnsupportedError: this torch keeps its schedules elsewhere.
    """
    holders = rank_of_stage(schedule, pp)
    _check_num_micro_batches(schedule, pp, num_micro_batches)
    with _TorchSchedules() as torch_schedules:
        if schedule in _SCHEDULE_CLASSES:
            actions = torch_schedules.of_class(_SCHEDULE_CLASSES[schedule], holders, pp, num_micro_batches)
        else:
            compute = _single_stage_order(schedule, pp, num_micro_batches)
            actions = torch_schedules.with_communication(compute, holders)
    return Orders(actions, holders)


@lru_cache(maxsize=256)
def compute_orders(schedule: str, pp: int, num_micro_batches: int) -> Orders:
    """The order of one training batch without its sends and receives, which cost most of the work: for planning.

    Raises: as ``schedule_orders``.
    """
    holders = rank_of_stage(schedule, pp)
    _check_num_micro_batches(schedule, pp, num_micro_batches)
    if schedule not in _SCHEDULE_CLASSES:
        compute = _single_stage_order(schedule, pp, num_micro_batches)
        kinds = {kind.value: kind for kind in ActionKind}
        return Orders(tuple(tuple(Action(at, kinds[kind], n) for at, kind, n in order) for order in compute), holders)
    with _TorchSchedules() as torch_schedules:
        name = _SCHEDULE_CLASSES[schedule]
        actions = torch_schedules.of_class(name, holders, pp, num_micro_batches, communication=False)
    return Orders(actions, holders)


@lru_cache(maxsize=256)
def forward_orders(schedule: str, pp: int, num_micro_batches: int) -> Orders:
    """The order of one evaluation batch: forwards only, for any number of micro-batches, on the stages of ``schedule``."""
    holders = rank_of_stage(schedule, pp)
    with _TorchSchedules() as torch_schedules:
        actions = torch_schedules.with_communication(_forward_order(holders, pp, num_micro_batches), holders)
    return Orders(actions, holders)


def first_backwards(actions: Sequence[Action]) -> dict[int, int]:
    """By micro-batch, where a rank first needs its gradient: everything before this index can run without it."""
    found: dict[int, int] = {}
    for at, action in enumerate(actions):
        if action.kind.starts_backward:
            found.setdefault(action.micro, at)
    return found


def next_forward(actions: Sequence[Action], start: int) -> int:
    """Index of the first forward at or after ``start``, or the length of the list."""
    return next((at for at in range(start, len(actions)) if actions[at].kind is ActionKind.FORWARD), len(actions))


def takes(schedule: str, pp: int, num_micro_batches: int) -> bool:
    """Whether a schedule can train on this number of micro-batches."""
    _check_name(schedule)
    return num_micro_batches >= pp and (schedule not in _IN_ROUNDS or _fits_rounds(pp, num_micro_batches))


def round_length(schedule: str, pp: int, num_micro_batches: int) -> int | None:
    """How many micro-batches a round has; None of schedules that do not go in rounds."""
    return num_micro_batches // _num_rounds(pp, num_micro_batches) if schedule in _IN_ROUNDS else None


def _check_name(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise PlanError("there is no such pipeline schedule", expected="one of " + ", ".join(SCHEDULES), got=repr(schedule))


def _check_num_micro_batches(schedule: str, pp: int, num_micro_batches: int) -> None:
    if num_micro_batches < pp:
        raise BatchError(
            "a batch needs at least as many micro-batches as there are pipeline stages",
            where=f"schedule {schedule}, pp={pp}",
            expected=f">= {pp} micro-batches",
            got=str(num_micro_batches),
            hint="use a larger batch or call set_micro_batch_size with a smaller number of rows",
        )
    if schedule in _IN_ROUNDS and not _fits_rounds(pp, num_micro_batches):
        usable = [str(number) for number in range(pp, num_micro_batches + 2 * pp) if _fits_rounds(pp, number)]
        raise BatchError(
            f"the schedule {schedule} cannot take this number of micro-batches",
            where=f"pp={pp}",
            expected="one of " + ", ".join(usable),
            got=str(num_micro_batches),
            hint="choose another micro-batch size, or the schedule 1f1b, which takes any number",
        )


def _fits_rounds(pp: int, num_micro_batches: int) -> bool:
    """Interleaved schedules run in rounds of equal length."""
    return num_micro_batches % _num_rounds(pp, num_micro_batches) == 0


def _num_rounds(pp: int, num_micro_batches: int) -> int:
    return max(1, num_micro_batches // pp)


_Compute = list[tuple[int, str, int]]


def _single_stage_order(schedule: str, pp: int, num_micro_batches: int) -> list[_Compute]:
    """gpipe and 1f1b without communication.

    Written out because torch's ``Schedule1F1B._get_pipeline_order`` is off by one on the last rank. Source: PipeDream-Flush
    (arXiv 2006.09503), figure 2.
    """
    orders = []
    for rank in range(pp):
        ahead = num_micro_batches if schedule == "gpipe" else min(num_micro_batches, pp - 1 - rank)
        order: _Compute = [(rank, "F", micro) for micro in range(ahead)]
        for micro in range(ahead, num_micro_batches):
            order += [(rank, "F", micro), (rank, "B", micro - ahead)]
        order += [(rank, "B", micro) for micro in range(num_micro_batches - ahead, num_micro_batches)]
        orders.append(order)
    return orders


def _forward_order(holders: Sequence[int], pp: int, num_micro_batches: int) -> list[_Compute]:
    """Forwards, each rank taking the latest stage that is ready, as if every forward took one tick."""
    orders: list[_Compute] = [[] for _ in range(pp)]
    done = [0] * len(holders)
    while done[-1] < num_micro_batches:
        before = [num_micro_batches, *done[:-1]]
        for rank in range(pp):
            ready = [s for s, holder in enumerate(holders) if holder == rank and done[s] < before[s]]
            if ready:
                stage = ready[-1]
                orders[rank].append((stage, "F", done[stage]))
                done[stage] += 1
    return orders


class _TorchSchedules:
    """torch's private schedule code; a change in it becomes one clear error.

    ``defer_pp_recv`` is never used: it breaks the pairwise order of sends and receives.
    """

    def __enter__(self) -> _TorchSchedules:
        from torch.distributed.pipelining import schedules

        self._schedules: Any = schedules
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (AttributeError, TypeError, ImportError, AssertionError)):
            import torch

            raise UnsupportedError(
                "torch.distributed.pipelining no longer offers its schedules in the form that is read here",
                where=f"torch {torch.__version__}",
                expected="a version from 2.11 on that this release was tested with",
                got=f"{type(error).__name__}: {error}",
                hint="install torch 2.13, or use tensor parallelism without pipeline parallelism",
            ) from error

    def of_class(
        self, name: str, holders: Sequence[int], pp: int, num_micro_batches: int, *, communication: bool = True
    ) -> tuple[tuple[Action, ...], ...]:
        """The order a schedule class computes when it is given stand-ins for its two stages."""
        from torch import nn

        stages = [
            SimpleNamespace(
                group_size=pp,
                group_rank=0,
                num_stages=len(holders),
                stage_index=stage,
                submod=nn.Module(),
                is_first=stage == 0,
                is_last=stage == len(holders) - 1,
            )
            for stage, holder in enumerate(holders)
            if holder == 0
        ]
        cls = getattr(self._schedules, name)
        if not communication:
            assert callable(cls._prepare_schedule_with_comms)
            cls = type(name, (cls,), {"_prepare_schedule_with_comms": lambda *args, **kwargs: None})
        schedule = cls(stages, num_micro_batches, loss_fn=lambda *_: None)
        mapping = schedule.stage_index_to_group_rank
        assert [mapping[stage] for stage in range(len(holders))] == list(holders), "stages lie on other ranks"
        return self._translate(schedule.pipeline_order_with_comms if communication else schedule.pipeline_order, pp)

    def with_communication(self, compute: Sequence[_Compute], holders: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
        kind: Callable[[str], Any] = self._schedules._ComputationType
        actions = {
            rank: [self._schedules._Action(stage, kind(name), micro) for stage, name, micro in order]
            for rank, order in enumerate(compute)
            if order
        }
        complete = self._schedules._add_send_recv(actions, lambda stage: holders[stage], len(holders))
        return self._translate(complete, len(compute))

    def _translate(self, orders: Any, pp: int) -> tuple[tuple[Action, ...], ...]:
        # By identity of torch's members, of which there are few: making ours of a name each time costs more than all the rest.
        kinds = {kind.value: kind for kind in ActionKind}  # the rest is FSDP's: UNSHARD, RESHARD, REDUCE_GRAD
        known = {theirs: kinds[theirs.value] for theirs in self._schedules._ComputationType if theirs.value in kinds}
        return tuple(
            tuple(
                Action(action.stage_index, known[action.computation_type], action.microbatch_index)
                for action in orders[rank]
                if action is not None and action.computation_type in known  # None: an idle tick
            )
            for rank in range(pp)
        )
