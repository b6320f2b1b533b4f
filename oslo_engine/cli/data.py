"""``oslo-engine data info | verify | merge | split | peek``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from oslo_engine.cli.output import bad_input_ends, print_table
from oslo_engine.errors import DataError

data = typer.Typer(name="data", help="Look at, check, join and divide data sets in Megatron's format.", no_args_is_help=True)

Name = Annotated[Path, typer.Argument(metavar="NAME", help="Common name of the .bin and .idx files.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace data sets that are there.")]


@data.command()
def info(name: Name) -> None:
    """Print what a data set holds, and what its manifest says.

    Exit code: 0, 2 for bad input.
    """
    with bad_input_ends():
        from dataclasses import asdict

        from oslo_engine.data.format import prefix_of
        from oslo_engine.data.operations import facts_of
        from oslo_engine.data.preprocess import read_manifest

        rows = list(asdict(facts_of(name)).items())
        manifest = read_manifest(prefix_of(name))
        if manifest is not None:
            settings = manifest["settings"]
            rows += [("tokenizer", manifest["tokenizer"]), ("tokenizer sha256", settings["tokenizer_sha256"])]
            rows += [("vocabulary", settings["vocab_size"]), ("end of document", settings["eod_token_id"])]
            rows += [("records left out", manifest["counts"]["skipped"])]
            rows += [("left out", f"{each['where']}: {each['complaint']}") for each in manifest["left_out"]]
            sources = settings["sources"] if isinstance(settings["sources"], list) else [[settings["sources"]]]
            rows += [("source", source[0]) for source in sources]
        print_table(("what", ""), ((what.replace("_", " "), value) for what, value in rows))


@data.command()
def verify(name: Name) -> None:
    """Check the files of a data set against each other and against the manifest.

    Exit code: 0, 2 if something is wrong.
    """
    with bad_input_ends():
        from oslo_engine.data.operations import verify_files

        typer.echo(f"{name}: {verify_files(name)}")


@data.command()
def merge(
    sources: Annotated[list[Path], typer.Argument(metavar="NAME...", help="Data sets, in this order.")],
    output: Annotated[Path, typer.Option(help="Common name of the new files.")],
    overwrite: Overwrite = False,
) -> None:
    """Join data sets into one.

    Exit code: 0, 2 for bad input.
    """
    with bad_input_ends():
        from oslo_engine.data.indexed import IndexedDataset
        from oslo_engine.data.operations import merge_files

        merge_files(sources, output, overwrite)
        merged = IndexedDataset(output)
        typer.echo(f"{output}: {merged.num_documents} documents, {merged.num_tokens} tokens")


@data.command()
def split(
    name: Name,
    parts: Annotated[list[str], typer.Argument(metavar="PART=SHARE...", help="Such as train=0.9 valid=0.1.")],
    overwrite: Overwrite = False,
) -> None:
    """Divide a data set into shares of its documents, each in files NAME_PART.

    Exit code: 0, 2 for bad input.
    """
    with bad_input_ends():
        from oslo_engine.data.operations import split_files

        shares = {f"{name}_{part}": share for part, share in map(_part, parts)}
        for part, count in split_files(name, shares, overwrite).items():
            typer.echo(f"{part}: {count} documents")


def _part(text: str) -> tuple[str, float]:
    part, _, share = text.partition("=")
    try:
        return part, float(share)
    except ValueError:
        raise DataError("a part is a name and a share", expected="train=0.9", got=text) from None


@data.command()
def peek(
    name: Name,
    document: Annotated[int, typer.Option(help="The first to show; negative numbers count from the end.")] = 0,
    count: Annotated[int, typer.Option(help="How many documents.")] = 3,
    tokens: Annotated[int, typer.Option(help="At most so many of each.")] = 32,
    tokenizer: Annotated[Optional[str], typer.Option(help="Shows the text too; as in preprocess.")] = None,  # noqa: UP045
) -> None:
    """Print the first tokens of some documents.

    Exit code: 0, 2 for bad input.
    """
    with bad_input_ends():
        from oslo_engine.data.indexed import IndexedDataset
        from oslo_engine.data.operations import decoded
        from oslo_engine.data.preprocess import read_manifest
        from oslo_engine.data.tokenizing import load_tokenizer

        opened = IndexedDataset(name)
        first = document + opened.num_documents if document < 0 else document
        if not 0 <= first < opened.num_documents:
            raise DataError("there is no such document", expected=f"one of {opened.num_documents}", got=document)
        known = None if tokenizer is None else load_tokenizer(tokenizer)
        manifest = read_manifest(opened.prefix)
        if known is not None and manifest and manifest["settings"].get("tokenizer_sha256") not in (None, known.digest):
            typer.echo(f"warning: made with another tokenizer, {manifest['tokenizer']}: texts may be wrong", err=True)
        for number in range(first, min(first + count, opened.num_documents)):
            found = opened.document(number)
            more = " ..." if len(found) > tokens else ""
            typer.echo(f"{number}: {len(found)} tokens: {' '.join(map(str, found[:tokens]))}{more}")
            if known is not None:
                typer.echo(f"    {decoded(known, found[:tokens])!r}{more}")
