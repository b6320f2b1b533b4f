"""A report as a picture: the memory of the layouts and of every rank of the best one, and its pipeline over a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oslo_engine.errors import MissingDependencyError, PlanError, UnsupportedError
from oslo_engine.pipeline.orders import compute_orders, num_stages, takes
from oslo_engine.pipeline.timeline import Event, draw_rows
from oslo_engine.planning.estimate import Estimate, RankEstimate
from oslo_engine.planning.rank_walk import simulated_count, walk
from oslo_engine.planning.report import PlanReport
from oslo_engine.planning.words import layout_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LAYOUTS = 8  # bars of layouts
_RANKS = 16  # rows of a pipeline that can be read
_ROUNDS = 2  # of a schedule that has more: boxes must be wide enough to see
_COLOURS = {"weights": "#2471a3", "gradients": "#7fb3d5", "optimizer": "#f0b27a", "activations": "#82c99d"}


def draw_report(report: PlanReport, file: str | Path | None = None) -> Figure:
    """Draw the best layout, or where none fits the one that lacks least.

    Args:
        file: where to save it, in the format of its suffix; None: nowhere.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        PlanError: no layout could be planned.
        UnsupportedError: no such format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("drawing a plan needs matplotlib", hint="pip install 'oslo-engine[plot]'") from error
    shown = (report.fitting or report.others)[:_LAYOUTS]
    if not shown:
        raise PlanError("there is no layout to draw", where=report.model, got=report.verdict)
    best = shown[0]
    pipeline = best.candidate.pp > 1 and report.question.workload.trains
    rows = min(best.candidate.pp, _RANKS)
    heights = [0.45 * len(shown) + 0.8, 0.3 * len(best.ranks) + 0.8] + [0.3 * rows + 1.0] * pipeline
    figure = Figure(figsize=(13, sum(heights) + 0.8), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    what = f"{report.model}, {report.parameters / 1e9:.3g} billion parameters, {report.dtype}\n"
    title = what + (
        "Fullest rank of the layouts that fit, fastest first"
        if report.fitting
        else "Fullest rank of the layouts that lack least"
    )
    _draw_memory(axes[0], [layout_words(each.candidate) for each in shown], [each.fullest for each in shown], report, title)
    names = [f"pp rank {rank.pp_rank}" for rank in best.ranks]
    _draw_memory(axes[1], names, best.ranks, report, f"Ranks of {layout_words(best.candidate)}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
    if pipeline:
        _draw_pipeline(axes[2], best)
    if file is not None:
        try:
            figure.savefig(file, dpi=110)
        except ValueError as error:
            known = ", ".join(sorted(figure.canvas.get_supported_filetypes()))
            raise UnsupportedError("pictures have no such format", expected=f"one of {known}", got=str(file)) from error
    return figure


def _draw_memory(axes: Axes, names: Sequence[str], ranks: Sequence[RankEstimate], report: PlanReport, title: str) -> None:
    unit, name = (1 << 30, "GiB") if report.question.cluster.memory >= 4 << 30 else (1 << 20, "MiB")
    left = [0.0] * len(ranks)
    for kind, colour in _COLOURS.items():
        sizes = [_bytes(rank, kind) / unit for rank in ranks]
        axes.barh(range(len(ranks)), sizes, left=left, color=colour, label=kind, height=0.7)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.axvline(report.question.cluster.memory / unit, color="red", linestyle="--", linewidth=1.2, label="memory of a GPU")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(name)


def _bytes(rank: RankEstimate, kind: str) -> int:
    held = rank.resident
    sizes = {
        "weights": held.weights + held.buffers,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "activations": rank.activations,
    }
    return sizes[kind]


def _draw_pipeline(axes: Axes, best: Estimate) -> None:
    layout = best.candidate
    shown = min(layout.micro_batches, _ROUNDS * layout.pp)
    if not takes(layout.schedule, layout.pp, shown):
        shown = simulated_count(layout.schedule, layout.pp, layout.micro_batches)
    draw_rows(axes, _events(best, shown)[:_RANKS])
    some = f"{shown} of {layout.micro_batches} micro-batches" if shown < layout.micro_batches else "a step"
    first = f", the first {_RANKS} of {layout.pp} ranks" if layout.pp > _RANKS else ""
    axes.set_title(f"{layout.schedule}, {some}{first}; bubble of the step {best.bubble:.0%}\n", loc="left", fontsize=10)
    axes.set_xlabel("ms, estimated, without messages")
    legend = axes.get_legend()
    if legend is not None:
        legend.set_bbox_to_anchor((1.0, 1.0))
        legend.set_loc("lower right")


def _events(best: Estimate, micro_batches: int) -> list[list[Event]]:
    layout = best.candidate
    stages = num_stages(layout.schedule, layout.pp)
    passes = 3 + layout.checkpointing
    pass_s = best.computing / (layout.micro_batches * passes) * layout.pp / stages
    orders = compute_orders(layout.schedule, layout.pp, micro_batches)
    return walk(orders, [pass_s] * stages, [pass_s * (passes - 1)] * stages)
