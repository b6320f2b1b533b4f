"""What a check is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from oslo_engine.verify.report import Row, not_applicable
from oslo_engine.verify.trial import Trial


@dataclass(frozen=True)
class Check:
    """rows: their names, in order. run: makes them; collective. why_not: why it does not apply to this trial."""

    rows: tuple[str, ...]
    run: Callable[[Trial], Iterator[Row]]
    why_not: str | None = None

    def results(self, trial: Trial) -> Iterator[Row]:
        if self.why_not is not None:
            yield from (not_applicable(name, self.why_not) for name in self.rows)
        else:
            yield from self.run(trial)
