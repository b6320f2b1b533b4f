"""What commands print: tables, and complaints about their input."""

from __future__ import annotations

from collections.abc import Iterator
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
