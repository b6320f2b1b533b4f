"""What comes out of planning: the layouts, best first, as objects, JSON and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from oslo_engine.planning.candidates import Candidate
from oslo_engine.planning.estimate import Estimate, RankEstimate
from oslo_engine.planning.question import Question

if TYPE_CHECKING:
    from rich.console import RenderableType

EXACT = "weights, buffers, gradients and optimizer state (without ZeRO); messages of tp and pp; micro-batches in flight"
ESTIMATED = (
    "activations (measured on fake tensors, without padding: within 10 % in the tests), ZeRO's parts, bubble (stages of equal "
    "cost), seconds (nothing overlaps)"
)
NOT_COUNTED = "the allocator's gaps, buffers of DistributedDataParallel and NCCL, what the CUDA context takes (about 0.5 GiB)"


@dataclass(frozen=True)
class PlanReport:
    """The answer to a question.

    model, dtype, parameters: what was planned.
    fitting: layouts that fit, fastest first. others: those that do not, by how much they lack.
    refused: why some layouts were not looked at: reason -> how many.
    least_gpus: the smallest number of such GPUs on which the model fits, and a layout there; None if no number was found.
    """

    model: str
    dtype: str
    parameters: int
    question: Question
    fitting: tuple[Estimate, ...]
    others: tuple[Estimate, ...]
    refused: dict[str, int]
    least_gpus: tuple[int, Estimate] | None = None

    @property
    def fits(self) -> bool:
        return bool(self.fitting)

    @property
    def best(self) -> Estimate | None:
        """The fastest layout that fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def verdict(self) -> str:
        """One sentence."""
        cluster = self.question.cluster
        there = f"{cluster.gpus} x {readable(cluster.memory)}"
        least = ""
        if self.least_gpus is not None and self.least_gpus[0] != cluster.gpus:
            least = f" The least number of such GPUs is {self.least_gpus[0]}: {layout_words(self.least_gpus[1].candidate)}."
        if self.best is not None:
            return f"It fits on {there}, in {len(self.fitting)} layouts; fastest: {layout_words(self.best.candidate)}.{least}"
        if not self.others:
            return f"No layout could be planned on {there}."
        nearest = self.others[0]
        missing = readable(nearest.memory - cluster.memory)
        return f"It does not fit on {there}: {layout_words(nearest.candidate)} lacks {missing} a GPU.{least}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data; bytes and seconds as numbers."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "parameters": self.parameters,
            "question": asdict(self.question),
            "verdict": self.verdict,
            "fitting": [_plain(estimate) for estimate in self.fitting],
            "others": [_plain(estimate) for estimate in self.others],
            "refused": self.refused,
            "least_gpus": None if self.least_gpus is None else {"gpus": self.least_gpus[0], **_plain(self.least_gpus[1])},
            "exact": EXACT,
            "estimated": ESTIMATED,
            "not_counted": NOT_COUNTED,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def __rich__(self) -> RenderableType:
        from oslo_engine.planning.tables import report_tables

        return report_tables(self)


def layout_words(candidate: Candidate) -> str:
    """``tp=8 pp=4 dp=2, 1f1b, 16 micro-batches of 2, recomputing, ZeRO 1``."""
    return ", ".join(_words(candidate))


def _words(candidate: Candidate) -> Iterator[str]:
    yield f"tp={candidate.tp} pp={candidate.pp} dp={candidate.dp}"
    if candidate.pp > 1:
        yield candidate.schedule
    yield f"{candidate.micro_batches} micro-batch{'es' * (candidate.micro_batches > 1)} of {candidate.rows}"
    if candidate.sequence_parallel:
        yield "sequence parallel"
    if candidate.checkpointing:
        yield "recomputing"
    if candidate.zero:
        yield f"ZeRO {candidate.zero}"


def readable(size_bytes: float) -> str:
    """``12.3 GiB``."""
    sign = "-" if size_bytes < 0 else ""
    size = abs(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.4g} {unit}"
        size /= 1024
    return f"{sign}{size:.4g} TiB"


def _plain(estimate: Estimate) -> dict[str, Any]:
    return {
        "layout": asdict(estimate.candidate),
        "memory": estimate.memory,
        "bubble": estimate.bubble,
        "seconds": estimate.seconds,
        "limit": estimate.limit,
        "ranks": [_plain_rank(rank) for rank in estimate.ranks],
    }


def _plain_rank(rank: RankEstimate) -> dict[str, Any]:
    return {
        "pp_rank": rank.pp_rank,
        "stages": list(rank.stages),
        **asdict(rank.resident),
        "activations": rank.activations,
        "total": rank.total,
        "in_flight": rank.in_flight,
        "messages": {f"{axis} {kind}": asdict(found) for (axis, kind), found in rank.messages.items()},
    }
