"""``oslo-engine checkpoint split | merge | reshard | verify | info``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from oslo_engine.cli.output import bad_input_ends, byte_progress, print_table, quiet_transformers
from oslo_engine.errors import CheckpointError, OsloError

checkpoint = typer.Typer(name="checkpoint", help="Convert and check checkpoints, in one process.", no_args_is_help=True)


def _folder(text: str) -> Path:
    """Of a variable that is not set, the shell makes an empty argument, which would be the current folder."""
    if not text:
        raise typer.BadParameter("it is empty; the current folder is .")
    return Path(text)


WITH_CONFIG = "Folder of a checkpoint, with its config.json."
Source = Annotated[Path, typer.Argument(metavar="SRC", parser=_folder, help=WITH_CONFIG)]
Target = Annotated[Path, typer.Argument(metavar="DST", parser=_folder, help="Folder to write.")]
Checked = Annotated[Path, typer.Argument(metavar="FOLDER", parser=_folder, help=WITH_CONFIG)]
Tp = Annotated[int, typer.Option(help="Tensor-parallel size.")]
Pp = Annotated[int, typer.Option(help="Pipeline-parallel size.")]
Files = Annotated[str, typer.Option(help="safetensors, or torch for pytorch_model_tp=?_pp=?.bin.")]
ExpertSplit = Annotated[str, typer.Option(help="inner: cut every expert; expert: deal whole experts.")]
PolicyName = Annotated[Optional[str], typer.Option(help="Name or YAML file; by default the installed one.")]  # noqa: UP045
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint in DST, at the end and in one step.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print which files would be written.")]


@checkpoint.command()
def split(
    source: Source,
    target: Target,
    tp: Tp = 1,
    pp: Pp = 1,
    serialization: Files = "safetensors",
    expert_split: ExpertSplit = "inner",
    policy: PolicyName = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Split a checkpoint that is whole: of Transformers, of torch.distributed.checkpoint.

    Exit code: 0, 2 for bad input.
    """
    with bad_input_ends():
        from oslo_engine.checkpoint.source import open_source
        from oslo_engine.checkpoint.split import SplitSource

        opened = open_source(source)
        if isinstance(opened, SplitSource):
            raise CheckpointError(
                "this checkpoint is split already",
                where=str(source),
                got=f"tp={opened.layout.tp} pp={opened.layout.pp}",
                hint="oslo-engine checkpoint reshard splits it in another way",
            )
    _reshard(source, target, tp, pp, serialization, expert_split, policy, overwrite, dry_run)


@checkpoint.command()
def reshard(
    source: Source,
    target: Target,
    tp: Tp = 1,
    pp: Pp = 1,
    serialization: Files = "safetensors",
    expert_split: ExpertSplit = "inner",
    policy: PolicyName = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Split a checkpoint, whole or split in any way, at this tp and pp.

    Exit code: 0, 2 for bad input.
    """
    _reshard(source, target, tp, pp, serialization, expert_split, policy, overwrite, dry_run)


@checkpoint.command()
def merge(
    source: Source,
    target: Target,
    max_shard_size: Annotated[str, typer.Option(help="Largest file, as in save_pretrained.")] = "50GB",
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Put a split checkpoint together into an ordinary one of Transformers.

    Exit code: 0, 2 for bad input.
    """
    with bad_input_ends(), byte_progress("merging") as progress:
        from oslo_engine.checkpoint.merge import merge as run

        quiet_transformers()
        sizes = run(source, target, max_shard_size=max_shard_size, overwrite=overwrite, dry_run=dry_run, progress=progress)
    _tell(target, sizes, dry_run)


@checkpoint.command()
def verify(folder: Checked) -> None:
    """Check that a checkpoint is whole: all files, their checksums if it is split, names and shapes by its config's model.

    Exit code: 0, 1 if something is wrong, 2 if there is no such folder.
    """
    with bad_input_ends():
        if not folder.is_dir():
            raise CheckpointError("there is no such checkpoint", where=str(folder), expected="a folder")
    try:
        with byte_progress("checking") as progress:
            from oslo_engine.checkpoint.verify import verify_folder

            quiet_transformers()
            source = verify_folder(folder, progress)
    except OsloError as error:
        typer.echo(f"{folder}: {error}")
        raise typer.Exit(1) from None
    typer.echo(f"{folder}: ok, {len(source.names())} tensors: {_what_was_checked(source)}")


@checkpoint.command()
def info(folder: Checked) -> None:
    """What a checkpoint is: its form and layout, model and policy, files and tensors. Only headers are read.

    Exit code: 0, 2 for bad input.
    """
    with bad_input_ends():
        from oslo_engine.checkpoint.source import open_source
        from oslo_engine.cli.checkpoint_table import facts, file_rows, tensor_rows, tensor_titles

        source = open_source(folder)
        print_table(("checkpoint", str(folder)), facts(folder, source))
        typer.echo()
        print_table(("file", "size"), file_rows(folder))
        typer.echo()
        print_table(tensor_titles(source), tensor_rows(source))


def _what_was_checked(source: Any) -> str:
    from oslo_engine.checkpoint.split import SplitSource

    if not isinstance(source, SplitSource):
        return "names, shapes and ties. Not its values and its config: it has no checksums"
    if not source.layout.configs:
        return "names, shapes, ties and checksums. Not its config, which has none"
    return "names, shapes, ties and checksums, of its config too"


def _reshard(
    source: Path,
    target: Path,
    tp: int,
    pp: int,
    serialization: str,
    expert_split: str,
    policy: str | None,
    overwrite: bool,
    dry_run: bool,
) -> None:
    with bad_input_ends(), byte_progress("splitting") as progress:
        from oslo_engine.checkpoint.reshard import reshard as run

        quiet_transformers()
        sizes = run(
            source,
            target,
            tp=tp,
            pp=pp,
            serialization=serialization,  # type: ignore[arg-type]
            policy=policy,
            expert_split=expert_split,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=progress,
        )
    _tell(target, sizes, dry_run)


def _tell(target: Path, sizes: dict[str, int], dry_run: bool) -> None:
    from oslo_engine.cli.plan_table import readable

    if dry_run:
        print_table(("file", "bytes"), ((name, f"{size:,}") for name, size in sorted(sizes.items())))
    did = "would be written; nothing was" if dry_run else "written"
    typer.echo(f"{target}: {len(sizes)} files, {readable(sum(sizes.values()))} {did}")
