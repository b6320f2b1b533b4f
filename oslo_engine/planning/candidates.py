"""The layouts that a cluster allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oslo_engine.footprint.workload import Workload
from oslo_engine.pipeline.orders import num_stages, takes
from oslo_engine.planning.question import Question

_SCHEDULES = ("1f1b", "interleaved", "zero-bubble-v")
_MOST_ROWS = 16  # of a micro-batch
_MOST_MICRO_BATCHES = 1024


@dataclass(frozen=True)
class Candidate:
    """A layout.

    rows: of a micro-batch. micro_batches: of a step, on one copy of the model.
    zero: stage of ZeRO.
    """

    tp: int
    pp: int
    dp: int
    schedule: str = "1f1b"
    rows: int = 1
    micro_batches: int = 1
    checkpointing: bool = False
    zero: int = 0
    sequence_parallel: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp


def candidates(question: Question, num_blocks: int, *, sequence_parallel: bool) -> Iterator[Candidate]:
    """Every layout worth looking at, whether it fits or not; of one kind those first that take least memory.

    Args:
        num_blocks: of the model; a stage needs one.
        sequence_parallel: whether the model can split the sequence.
    """
    cluster, workload = question.cluster, question.workload
    for tp in _divisors(cluster.gpus, cluster.node_size):
        for pp in _divisors(cluster.gpus // tp, num_blocks):
            dp = cluster.gpus // (tp * pp)
            if question.batch % dp:
                continue
            for schedule, rows, micro_batches in _batches(question, num_blocks, pp, dp):
                for checkpointing in _choices(question):
                    for zero in _zero_stages(dp, pp, question):
                        for split in (False, True) if _can_split(tp, workload, sequence_parallel) else (False,):
                            yield Candidate(tp, pp, dp, schedule, rows, micro_batches, checkpointing, zero, split)


def _can_split(tp: int, workload: Workload, allowed: bool) -> bool:
    return allowed and tp > 1 and workload.trains and workload.length % tp == 0 and workload.target_length % tp == 0


def _batches(question: Question, num_blocks: int, pp: int, dp: int) -> Iterator[tuple[str, int, int]]:
    """(schedule, rows, number of micro-batches) of one copy's share of the batch."""
    share = question.batch // dp
    if not question.workload.trains:
        yield "1f1b", share, 1
        return
    for rows in (2**power for power in range(_MOST_ROWS.bit_length())):
        count = share // rows
        if share % rows or not pp <= count <= max(_MOST_MICRO_BATCHES, share if rows == _MOST_ROWS else 0):
            continue
        for schedule in _SCHEDULES if pp > 1 else ("1f1b",):
            if num_stages(schedule, pp) <= num_blocks and takes(schedule, pp, count):
                yield schedule, rows, count


def _zero_stages(dp: int, pp: int, question: Question) -> tuple[int, ...]:
    if dp == 1 or not question.workload.trains:
        return (0,)
    return tuple(stage for stage in ((3, 2, 1, 0) if pp == 1 else (1, 0)) if stage <= question.most_zero)


def _choices(question: Question) -> tuple[bool, ...]:
    if not question.workload.trains:
        return (False,)
    return (True, False) if question.checkpointing is None else (question.checkpointing,)


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]
