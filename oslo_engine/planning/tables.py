"""A report as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oslo_engine.planning.estimate import Estimate
from oslo_engine.planning.words import ESTIMATED, EXACT, NOT_COUNTED, layout_words, readable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from oslo_engine.planning.report import PlanReport

SHOWN = 10


def report_tables(report: PlanReport) -> RenderableType:
    """The verdict, the layouts, the ranks of the best (or nearest) one, and how far to trust the figures."""
    from rich.console import Group
    from rich.text import Text

    cluster, work = report.question.cluster, report.question.workload
    head = (
        f"{report.model}, {report.parameters:,} parameters, {report.dtype}; {work.task}, {report.question.batch} rows of "
        f"{work.length} tokens" + (f", {work.optimizer}" if work.trains else "")
    )
    shown = (report.fitting or report.others)[:SHOWN]
    parts: list[RenderableType] = [Text(head), Text(report.verdict, style="bold"), Text()]
    if shown:
        title = "Layouts that fit, fastest first" if report.fitting else "Layouts that lack least"
        parts += [_layouts(shown, title), Text()]
        parts += [_ranks(shown[0], f"Ranks of: {layout_words(shown[0].candidate)} ({readable(cluster.memory)} each)"), Text()]
        parts += [_messages(shown[0]), Text()]
    for reason, count in report.refused.items():
        parts.append(Text(f"{count} layouts left out: {reason}"))
    parts += [Text(f"exact: {EXACT}"), Text(f"estimated: {ESTIMATED}"), Text(f"not counted: {NOT_COUNTED}")]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _layouts(estimates: Sequence[Estimate], title: str) -> Table:
    table = _table(
        title, "layout", "fullest rank", "weights", "gradients", "optimizer", "activations", "bubble", "s/step", "limit"
    )
    for estimate in estimates:
        held, rank = estimate.fullest.resident, estimate.fullest
        sizes = (rank.total, held.weights + held.buffers, held.gradients, held.optimizer, rank.activations)
        table.add_row(
            layout_words(estimate.candidate),
            *map(readable, sizes),
            f"{estimate.bubble:.0%}",
            f"{estimate.seconds:.3g}",
            estimate.limit,
        )
    return table


def _ranks(estimate: Estimate, title: str) -> Table:
    table = _table(title, "pp rank", "stages", "weights", "gradients", "optimizer", "activations", "in flight", "total")
    for rank in estimate.ranks:
        held = rank.resident
        sizes = (held.weights + held.buffers, held.gradients, held.optimizer, rank.activations)
        stages = ", ".join(map(str, rank.stages))
        table.add_row(str(rank.pp_rank), stages, *map(readable, sizes), str(rank.in_flight), readable(rank.total))
    return table


def _messages(estimate: Estimate) -> Table:
    rank = estimate.fullest
    table = _table(f"What pp rank {rank.pp_rank} hands to others in a step", "axis", "kind", "calls", "bytes")
    for (axis, kind), found in rank.messages.items():
        table.add_row(axis, kind, f"{found.calls:,}", readable(found.bytes))
    return table
