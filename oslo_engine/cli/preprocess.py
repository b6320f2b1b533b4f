"""``oslo-engine preprocess``: from text to a data set in Megatron's format."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from oslo_engine.cli.output import bad_input_ends

if TYPE_CHECKING:
    from oslo_engine.data.preprocess import ProgressReport


def preprocess(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Files, folders or wildcards: .txt (a document on each line), .jsonl, both also .gz or .zst, .parquet."
        ),
    ],
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, a folder with a tokenizer, or a name on the hub.")],
    output: Annotated[Path, typer.Option(help="Common name of the .bin, .idx and .manifest.json files.")],
    json_key: Annotated[str, typer.Option(help="Key of the text in a JSON object, or column of a table.")] = "text",
    file_format: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it
        typer.Option("--format", help="txt, jsonl or parquet, where names of files do not say it."),
    ] = None,
    append_eod: Annotated[bool, typer.Option("--append-eod", help="End each document with a token.")] = False,
    eod_token_id: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Which; by default what the tokenizer says ends a text."),
    ] = None,
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Processes that tokenize; by default one for each core."),
    ] = None,
    on_error: Annotated[str, typer.Option(help="At a record that is no document: stop, or skip it.")] = "stop",
    chunk_size: Annotated[int, typer.Option(help="Bytes of text that are one piece of work.")] = 1 << 21,
    fast: Annotated[bool, typer.Option(help="Encode with tiktoken where that is shown to give the same ids.")] = True,
    resume: Annotated[bool, typer.Option(help="Go on with what a call that was interrupted has left.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a data set of that name.")] = False,
) -> None:
    """Tokenize texts into a data set in Megatron's format.

    Killed at any moment, it leaves the old data set or none, and goes on where it was when it is called again.

    Exit code: 0, 2 for bad input.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with bad_input_ends():
        from oslo_engine.data.preprocess import DatasetPreprocessor, read_manifest
        from oslo_engine.data.tokenizing import load_tokenizer

        preprocessor = DatasetPreprocessor(
            load_tokenizer(tokenizer),
            chunk_size=chunk_size,
            append_eod=append_eod,
            eod_token_id=eod_token_id,
            workers=workers,
            on_error=on_error,
            fast=fast,
        )
        with token_progress() as report:
            data = preprocessor.preprocess(
                inputs,
                output,
                json_key=json_key,
                file_format=file_format,
                overwrite=overwrite,
                resume=resume,
                report=report,
            )
        manifest = read_manifest(data.prefix)
        assert manifest is not None
        counts = manifest["counts"]
        left_out = f", {counts['skipped']} records left out" if counts["skipped"] else ""
        typer.echo(
            f"{data.prefix}: {counts['documents']} documents, {counts['tokens']} tokens of {manifest['dtype']}{left_out}"
        )


@contextmanager
def token_progress() -> Iterator[ProgressReport | None]:
    """A bar with MB/s, tokens and the time left on the terminal; None where there is none."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from oslo_engine.data.draft import Progress as Done

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(done: Done, total: int | None) -> None:
            bar.update(task, completed=done.source_bytes, total=total, description=f"{done.tokens / 1e6:.1f}M tokens")

        yield report
