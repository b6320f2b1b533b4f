"""A picture of what every rank computed when."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from oslo_engine.errors import MissingDependencyError
from oslo_engine.pipeline.orders import Action, ActionKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    ActionKind.FORWARD: "#7fb3d5",
    ActionKind.BACKWARD: "#f0b27a",
    ActionKind.BACKWARD_INPUT: "#f0b27a",
    ActionKind.BACKWARD_WEIGHT: "#82c99d",
}
_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward of inputs",
    ActionKind.BACKWARD_WEIGHT: "backward of weights",
}
_NARROW = 0.01  # share of the picture's width below which a box has no room for its number


@dataclass(frozen=True)
class Event:
    """One computation of one rank; times are seconds of the system clock, comparable between machines whose clocks agree."""

    kind: ActionKind
    stage: int
    micro: int
    start_s: float
    end_s: float


@contextmanager
def noted(action: Action, timeline: list[Event], device: torch.device) -> Iterator[None]:
    """Append what happens inside to a timeline. On an accelerator it waits for the device before and after."""
    _synchronize(device)
    start_s = time.time()
    yield
    _synchronize(device)
    timeline.append(Event(action.kind, action.stage, action.micro, start_s, time.time()))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def draw_timeline(events: Sequence[Sequence[Event]], file: str | Path | None = None) -> Figure:
    """Draw one row per rank, with a box for every computation, labelled by its micro-batch; the axis is in milliseconds.

    Boxes of stages after the first on a rank have dark edges; boxes too narrow for their label have none.

    Args:
        events: what each rank's ``runtime.timeline`` held, gathered, by pp rank.
        file: where to save it, in the format of its suffix; None: nowhere.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("drawing a timeline needs matplotlib", hint="pip install 'oslo-engine[plot]'") from error

    figure = Figure(figsize=(12, 0.6 * len(events) + 1.4), layout="constrained")
    draw_rows(figure.add_subplot(), events)
    if file is not None:
        figure.savefig(file)
    return figure


def draw_rows(axes: Axes, events: Sequence[Sequence[Event]]) -> None:
    """Draw the boxes, the axis and the legend of ``draw_timeline`` on axes of matplotlib's."""
    from matplotlib.patches import Patch

    start_s = min((event.start_s for row in events for event in row), default=0.0)
    total_ms = (max((event.end_s for row in events for event in row), default=0.0) - start_s) * 1e3
    for rank, row in enumerate(events):
        first_stage = min((event.stage for event in row), default=0)
        for event in row:
            left_ms, width_ms = (event.start_s - start_s) * 1e3, (event.end_s - event.start_s) * 1e3
            edge = "black" if event.stage > first_stage else "white"
            axes.barh(rank, width_ms, left=left_ms, height=0.85, color=_COLOURS[event.kind], edgecolor=edge, linewidth=0.8)
            if width_ms > _NARROW * total_ms:
                axes.text(left_ms + width_ms / 2, rank, str(event.micro), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(events)), [f"rank {rank}" for rank in range(len(events))])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.margins(x=0)
    kinds = [kind for kind in _NAMES if any(event.kind is kind for row in events for event in row)]
    axes.legend(
        handles=[Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in kinds],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.2),
        ncols=4,
        frameon=False,
    )
