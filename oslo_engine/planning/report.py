"""What comes out of planning: the layouts, best first, as objects, JSON and tables."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from oslo_engine.planning.estimate import Estimate, RankEstimate
from oslo_engine.planning.question import Question
from oslo_engine.planning.words import ESTIMATED, EXACT, NOT_COUNTED, layout_words, readable

if TYPE_CHECKING:
    from rich.console import RenderableType


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
        """One line for each layout: indented, hundreds of them for thousands of GPUs would take a second to write."""
        content = self.to_dict()
        lists = {key: content.pop(key) for key in ("fitting", "others")}
        lines = {key: "[\n  " + ",\n  ".join(map(json.dumps, layouts)) + "]" for key, layouts in lists.items()}
        entries = [(key, json.dumps(value)) for key, value in content.items()]
        return "{" + ",\n ".join(f"{json.dumps(key)}: {text}" for key, text in (*entries, *lines.items())) + "}"

    def __rich__(self) -> RenderableType:
        from oslo_engine.planning.tables import report_tables

        return report_tables(self)


def _plain(estimate: Estimate) -> dict[str, Any]:
    return {
        "layout": asdict(estimate.candidate),
        "memory": estimate.memory,
        "bubble": estimate.bubble,
        "computing_seconds": estimate.computing,
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
