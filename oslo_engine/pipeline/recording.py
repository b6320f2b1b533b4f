"""Noting when every rank computed what, for a picture of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from oslo_engine.errors import PlanError
from oslo_engine.pipeline.timeline import Event, draw_timeline
from oslo_engine.rewrite.state import parallel_state


@dataclass
class Timeline:
    """What was computed when: one list of events per pp rank, filled when ``record_timeline`` is left."""

    draws: bool
    events: list[list[Event]] = field(default_factory=list)

    def draw(self, file: str | Path) -> None:
        """Save a picture; the first rank of the job writes it, the others do nothing."""
        if self.draws:
            draw_timeline(self.events, file)


@contextmanager
def record_timeline(model: nn.Module) -> Iterator[Timeline]:
    """Note every computation of the pipeline while inside.

        with oslo.record_timeline(model) as timeline:
            model.train_step(batch)
        timeline.draw("timeline.png")

    Raises:
        PlanError: the model is no pipeline.

    Communication: collective over pp when left (the events are gathered). On an accelerator every computation is waited for.
    """
    state = parallel_state(model)
    if state.program is None:
        raise PlanError("a timeline needs a pipeline", expected="pp > 1", got="pp=1")
    runtime, at = state.program.runtime, state.mesh.at
    timeline = Timeline(draws=(at.pp_rank, at.dp_rank, at.tp_rank) == (0, 0, 0))
    runtime.timeline = []
    try:
        yield timeline
    finally:
        mine, runtime.timeline = runtime.timeline, None
    gathered: list[Any] = [None] * state.mesh.pp.size
    dist.all_gather_object(gathered, mine, group=state.mesh.pp.group)
    timeline.events = gathered
