"""``oslo-engine plan``: how many GPUs does it take, and in which layout?"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer

from oslo_engine.cli.output import bad_input_ends, quiet_transformers, wide_console
from oslo_engine.errors import UnsupportedError

_WORK, _MACHINE = "Work", "Machine"


def plan(
    model: Annotated[str, typer.Argument(help="Model type, folder with a config.json, or hub name; no weights are read.")],
    gpus: Annotated[int, typer.Option(help="GPUs in all.", rich_help_panel=_MACHINE)],
    memory: Annotated[str, typer.Option(help="Of each: 80GiB, 40GB, ...", rich_help_panel=_MACHINE)],
    node_size: Annotated[int, typer.Option(help="GPUs that fast links join.", rich_help_panel=_MACHINE)] = 8,
    node_gb_per_s: Annotated[float, typer.Option(help="GB/s from a GPU to one of its node.", rich_help_panel=_MACHINE)] = 300,
    cluster_gb_per_s: Annotated[float, typer.Option(help="GB/s to another node.", rich_help_panel=_MACHINE)] = 25,
    tflops: Annotated[float, typer.Option(help="10^12 operations a second of a GPU.", rich_help_panel=_MACHINE)] = 300,
    task: Annotated[str, typer.Option(help="train or inference.", rich_help_panel=_WORK)] = "train",
    batch: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Rows of a step over all GPUs, or sequences at a time; by default one a GPU.", rich_help_panel=_WORK),
    ] = None,
    seq: Annotated[int, typer.Option(help="Tokens of a row; in inference with the continuation.", rich_help_panel=_WORK)] = 512,
    target_seq: Annotated[int, typer.Option(help="Tokens of a target, of encoder-decoders.", rich_help_panel=_WORK)] = 128,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.", rich_help_panel=_WORK)] = "bfloat16",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw-master, adafactor, sgd-momentum or sgd.", rich_help_panel=_WORK)
    ] = "adamw",
    checkpointing: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--checkpointing/--no-checkpointing", help="By default both are tried.", rich_help_panel=_WORK),
    ] = None,
    policy: Annotated[Optional[str], typer.Option(help="Name or YAML file; by default the installed one.")] = None,  # noqa: UP045
    json: Annotated[Optional[Path], typer.Option(help="Also write all layouts to this file.")] = None,  # noqa: UP045
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Also draw memory and pipeline of the best layout to this file (.png, .svg, .pdf)."),
    ] = None,
) -> None:
    """List the layouts of a model that fit on some GPUs, with memory, messages and bubble. Needs no GPU and no weights.

    Exit code: 0 if one fits, 1 if none does, 2 for bad input.
    """
    with _without_collections(), bad_input_ends():
        from oslo_engine.planning import plan as make_plan

        for file in (json, picture):
            if file is not None and not file.parent.is_dir():
                raise UnsupportedError("this cannot be written there", expected="a file in a folder that exists", got=str(file))
        quiet_transformers()
        report = make_plan(
            model,
            gpus=gpus,
            memory=memory,
            task=task,  # type: ignore[arg-type]
            batch=batch,
            length=seq,
            target_length=target_seq,
            dtype=dtype,
            optimizer=optimizer,
            checkpointing=checkpointing,
            node_size=node_size,
            node_gb_per_s=node_gb_per_s,
            cluster_gb_per_s=cluster_gb_per_s,
            tflops=tflops,
            policy=policy,
        )
        if json is not None:
            json.write_text(report.to_json() + "\n", encoding="utf-8")
        if picture is not None:
            from oslo_engine.planning.picture import draw_report

            draw_report(report, picture)
        wide_console().print(report)
    raise typer.Exit(0 if report.fits else 1)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Planning makes millions of objects and few cycles: looking for these again and again takes a sixth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
