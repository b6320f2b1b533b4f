"""What commands print: tables, progress, and complaints about their input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from oslo_engine.errors import OsloError

if TYPE_CHECKING:
    from rich.console import Console

BAD_INPUT = 2
WIDTH = 160  # of tables that go to a file or a pipe


@contextmanager
def bad_input_ends() -> Iterator[None]:
    """Bad input ends a command with our own message and exit code 2; a traceback would only hide it."""
    try:
        yield
    except OsloError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None


def wide_console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def quiet_transformers() -> None:
    """What it says about tiny models and missing tokens is of no interest in a table."""
    import transformers

    transformers.logging.set_verbosity_error()


def print_table(titles: tuple[str, ...], rows: Iterable[Iterable[object]], caption: str | None = None) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title=caption, title_justify="left")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    wide_console().print(table)


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar with bytes, speed and time on the terminal; None where there is none.

    Returns:
        What is to be called with (bytes done, bytes in all).
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
