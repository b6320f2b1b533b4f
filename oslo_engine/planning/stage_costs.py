"""What each pipeline stage of a layout keeps, needs and communicates in a micro-batch, put together from a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oslo_engine.footprint.live_bytes import Segment, Traffic
from oslo_engine.footprint.profile import OUTSIDE, SentValue, StepProfile
from oslo_engine.plan.plan import Plan


@dataclass(frozen=True)
class Cost:
    """Of one pass: the most that is alive in it, above its start; what is alive after it; tp collectives."""

    peak: int = 0
    kept: int = 0
    traffic: Traffic = field(default_factory=dict)


@dataclass(frozen=True)
class StageCosts:
    """Of one stage and micro-batch.

    received, sent: the values that come from the stage before, and go to the one behind.
    """

    forward: Cost
    backward: Cost
    received: tuple[SentValue, ...] = ()
    sent: tuple[SentValue, ...] = ()


def fold(segments: Iterable[Segment]) -> Cost:
    """Segments one after the other as one pass."""
    level = peak = 0
    calls: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for segment in segments:
        peak = max(peak, level + segment.peak)
        level += segment.kept
        for kind, (count, amount) in segment.traffic.items():
            calls[kind] += count
            size[kind] += amount
    return Cost(peak, level, {kind: (calls[kind], size[kind]) for kind in calls})


def with_rows(one: StepProfile, two: StepProfile, rows: int) -> StepProfile:
    """A profile of any number of rows, from those of one row and of two: everything grows by the same with every row."""

    def grown(first: int, second: int) -> int:
        return first + (second - first) * (rows - 1)

    def segment(first: Segment, second: Segment) -> Segment:
        traffic = {kind: (calls, grown(size, second.traffic[kind][1])) for kind, (calls, size) in first.traffic.items()}
        return Segment(first.label, grown(first.kept, second.kept), max(0, grown(first.peak, second.peak)), traffic)

    assert [each.label for each in one.forward] == [each.label for each in two.forward], "rows change what runs"
    return StepProfile(
        tuple(map(segment, one.forward, two.forward)),
        tuple(map(segment, one.backward, two.backward)),
        {
            block: {
                place: SentValue(grown(value.bytes, two.sent[block][place].bytes), value.num_dims, value.has_gradient)
                for place, value in values.items()
            }
            for block, values in one.sent.items()
        },
    )


class BlockCosts:
    """A profile, sorted by blocks.

    Args:
        stands_for: for every block of the model the block of the profile that is like it.
    """

    def __init__(self, profile: StepProfile, stands_for: Mapping[str, str]) -> None:
        self.stands_for, self.sent = stands_for, profile.sent
        self.before: dict[str, list[Segment]] = {}
        self.forward: dict[str, Segment] = {}
        self.backward: dict[str, list[Segment]] = {}
        waiting: list[Segment] = []
        for segment in profile.forward:
            path = segment.label[1]
            if path == OUTSIDE:
                waiting.append(segment)
            else:
                self.before.setdefault(path, waiting)
                self.forward.setdefault(path, segment)
                waiting = []
        self.exit = waiting
        self.exit_backward: list[Segment] = []
        current: list[Segment] = self.exit_backward
        for segment in profile.backward:
            if segment.label[1] != OUTSIDE:
                current = self.backward.setdefault(segment.label[1], [])
            current.append(segment)

    def of_stage(self, blocks: Sequence[str], *, last: bool, received: Sequence[SentValue] = ()) -> tuple[Cost, Cost]:
        """Forward and backward of a stage that runs these blocks, in order.

        Args:
            last: whether it also computes the loss.
            received: the values that come from the stage before.
        """
        like = [self.stands_for[block] for block in blocks]
        arrived = sum(value.bytes for value in received)
        forward = [Segment(("forward", OUTSIDE), arrived, arrived)] if received else []
        for at, block in enumerate(like):
            forward += self.before[block] if not (at == 0 and received and not self._starts(blocks[0])) else []
            forward.append(self.forward[block])
        forward += self.exit if last else []
        backward = list(self.exit_backward) if last else []
        for block in reversed(like):
            backward += self.backward.get(block, [])
        return fold(forward), fold(backward)

    def _starts(self, block: str) -> bool:
        """Whether what runs before this block is a part of the model (another embedding), not the gap between two blocks."""
        return any(segment.traffic or segment.kept for segment in self.before[self.stands_for[block]])

    def value(self, block: str, path: Sequence[Any]) -> SentValue:
        return self.sent[self.stands_for[block]][tuple(path)]


def stage_costs(costs: BlockCosts, plan: Plan, carried: Sequence[Sequence[tuple[str, tuple[Any, ...]]]]) -> list[StageCosts]:
    """Of every stage of a plan.

    Args:
        carried: for every stage the values that it receives, as (block, place in its output).
    """
    arriving = [tuple(costs.value(block, path) for block, path in values) for values in carried]
    found = []
    for stage in range(plan.num_stages):
        blocks = [call.block for call in plan.calls if call.stage == stage]
        last = stage == plan.num_stages - 1
        forward, backward = costs.of_stage(blocks, last=last, received=arriving[stage])
        found.append(StageCosts(forward, backward, arriving[stage], () if last else arriving[stage + 1]))
    return found
