"""What a rank is told, and what it answers. Light: the process that starts the ranks imports this and not what they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oslo_engine.errors import OsloError
from oslo_engine.verify.report import Row

if TYPE_CHECKING:
    from oslo_engine.tiny.subject import Subject
    from oslo_engine.verify.settings import Settings


@dataclass(frozen=True)
class Task:
    """The same for all ranks. tied: what was asked for. folder: empty, on this machine, shared."""

    subject: Subject
    settings: Settings
    tied: bool | None
    folder: Path
    timeout_s: float

    def stack_file(self, rank: int) -> Path:
        """Where a rank writes its stack on SIGUSR1."""
        return self.folder / f"stack-{rank}"


@dataclass(frozen=True)
class Message:
    """From a rank: the names of all rows to come, a row, why the model cannot be split, or an error; ``done`` at the end."""

    names: tuple[str, ...] = ()
    row: Row | None = None
    refused: OsloError | None = None
    error: str = ""
    done: bool = False
