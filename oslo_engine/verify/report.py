"""What came out: one row for each check, and the verdict."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import RenderableType

Verdict = Literal["pass", "fail", "not applicable", "not run"]
_STYLES = {"pass": "green", "fail": "bold red", "not applicable": "dim", "not run": "yellow"}


@dataclass(frozen=True)
class Row:
    """One check.

    figure, limit: what was measured, and the most that passes; None where there is no number.
    detail: what the figure is of (the worst parameter), or why there is none.
    """

    name: str
    verdict: Verdict
    figure: float | None = None
    limit: float | None = None
    detail: str = ""


def judge(name: str, figure: float, limit: float, detail: str = "") -> Row:
    return Row(name, "pass" if figure <= limit else "fail", figure, limit, detail)


def not_applicable(name: str, why: str) -> Row:
    return Row(name, "not applicable", detail=why)


@dataclass(frozen=True)
class Report:
    """The result of ``oslo.verify``. Printed, it is the table.

    model: class and model type. settings: what was asked for.
    errors: what each rank raised, or where it stood when the time was up.
    """

    model: str
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    seconds: float
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Every check that applies was run and passed."""
        verdicts = {row.verdict for row in self.rows}
        return "pass" in verdicts and not verdicts & {"fail", "not run"} and not self.errors

    @property
    def summary(self) -> str:
        counts = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in _STYLES}
        named = {"pass": "passed", "fail": "failed", "not applicable": "not applicable", "not run": "not run"}
        parts = [f"{count} {named[verdict]}" for verdict, count in counts.items() if count]
        layout = " ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{'PASS' if self.ok else 'FAIL'}  {self.model}  {layout}: {', '.join(parts)} in {self.seconds:.1f} s"

    def to_json(self) -> str:
        content = {"ok": self.ok, **asdict(self)}
        return json.dumps(_finite(content), indent=2)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("check", "figure", "limit", "verdict", "detail"):
            table.add_column(title, justify="right" if title in ("figure", "limit") else "left", overflow="fold")
        for row in self.rows:
            style = _STYLES[row.verdict]
            table.add_row(row.name, _number(row.figure), _number(row.limit), Text(row.verdict, style), Text(row.detail))
        errors = [Text(f"rank {rank}: {text.rstrip()}") for rank, text in _grouped(self.errors)]
        return Group(table, *errors, Text(self.summary, "bold green" if self.ok else "bold red"))

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=160, color_system=None).print(self)
        return text.getvalue().rstrip()


def merge_rows(name: str, rows: Mapping[int, Row], num_ranks: int) -> Row:
    """One row from those of the ranks: the worst. If one sent none, and no other failed, the row is "not run"."""
    failed = {rank: row for rank, row in rows.items() if row.verdict == "fail"}
    if failed:
        rank = max(failed, key=lambda rank: _size(failed[rank].figure))
        worst = failed[rank]
        where = [f"rank {rank}"] if num_ranks > 1 else []
        return replace(worst, detail=", ".join([worst.detail] * bool(worst.detail) + where))
    if len(rows) < num_ranks:
        return Row(name, "not run", detail="an earlier check ended the run")
    passed = [row for row in rows.values() if row.verdict == "pass"]
    return max(passed, key=lambda row: _size(row.figure)) if passed else rows[0]


def _size(figure: float | None) -> float:
    return math.inf if figure is None or math.isnan(figure) else figure


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) or value == 0 or math.isinf(value) else f"{value:.1e}"


def _grouped(errors: dict[int, str]) -> list[tuple[str, str]]:
    """Ranks that say the same, together."""
    ranks: dict[str, list[str]] = {}
    for rank, text in sorted(errors.items()):
        ranks.setdefault(text, []).append(str(rank))
    return [(", ".join(those), text) for text, those in ranks.items()]


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
