"""``oslo-engine verify MODEL``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from oslo_engine.cli.output import bad_input_ends, quiet_transformers, wide_console
from oslo_engine.errors import UnsupportedError

Sizes, Layout, Numbers = "Sizes of the model", "Layout", "Numbers"


def verify(
    model: Annotated[str, typer.Argument(help="Model type, folder or hub name: only its config is read.")],
    task: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="causal, masked or seq2seq, where the architecture has several."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.", rich_help_panel=Layout)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.", rich_help_panel=Layout)] = 1,
    schedule: Annotated[
        str, typer.Option(help="gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-v.", rich_help_panel=Layout)
    ] = "1f1b",
    micro_batch_size: Annotated[int, typer.Option(help="Rows of a micro-batch.", rich_help_panel=Layout)] = 2,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split activations along the sequence.", rich_help_panel=Layout)
    ] = False,
    expert_split: Annotated[
        str, typer.Option(help="inner: cut every expert; expert: deal whole experts.", rich_help_panel=Layout)
    ] = "inner",
    policy: Annotated[
        Optional[str], typer.Option(help="Name or YAML file; by default the installed one.", rich_help_panel=Layout)  # noqa: UP045
    ] = None,
    heads: Annotated[Optional[int], typer.Option(help="Attention heads.", rich_help_panel=Sizes)] = None,  # noqa: UP045
    kv_heads: Annotated[Optional[int], typer.Option(help="Key-value heads.", rich_help_panel=Sizes)] = None,  # noqa: UP045
    vocab: Annotated[Optional[int], typer.Option(help="Vocabulary.", rich_help_panel=Sizes)] = None,  # noqa: UP045
    layers: Annotated[Optional[int], typer.Option(help="Layers of each stack.", rich_help_panel=Sizes)] = None,  # noqa: UP045
    tied: Annotated[
        Optional[bool], typer.Option("--tied/--untied", help="Embedding and head are one parameter.", rich_help_panel=Sizes)  # noqa: UP045
    ] = None,
    full_size: Annotated[
        bool,
        typer.Option("--full-size", help="Keep the config's sizes; every rank holds the model twice.", rich_help_panel=Sizes),
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.", rich_help_panel=Numbers)] = "float32",
    dropout: Annotated[float, typer.Option(help="Probability; above 0 the masks are checked.", rich_help_panel=Numbers)] = 0.0,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute activations.", rich_help_panel=Numbers)
    ] = False,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Fuse the split model; attention is then eager.", rich_help_panel=Numbers)
    ] = False,
    seed: Annotated[int, typer.Option(help="Of weights, batches and masks.", rich_help_panel=Numbers)] = 0,
    json: Annotated[Optional[Path], typer.Option(help="Also write the report to this file.")] = None,  # noqa: UP045
    timeout: Annotated[float, typer.Option(help="Seconds after which the ranks are ended.")] = 300,
) -> None:
    """Split a tiny random model over tp * pp processes here and compare it, number by number, with the unsplit one.

    Exit code: 0 if every check passed, 1 if one failed, 2 for bad input.
    """
    with bad_input_ends():
        from oslo_engine.verify import verify as run_verify

        if json is not None and not json.parent.is_dir():
            raise UnsupportedError(
                "the report cannot be written there", expected="a file in a folder that exists", got=str(json)
            )
        quiet_transformers()
        report = run_verify(
            model,
            task=task,
            tp=tp,
            pp=pp,
            schedule=schedule,
            micro_batch_size=micro_batch_size,
            sequence_parallel=sequence_parallel,
            expert_split=expert_split,
            policy=policy,
            heads=heads,
            kv_heads=kv_heads,
            vocab=vocab,
            layers=layers,
            tied=tied,
            full_size=full_size,
            dtype=dtype,  # type: ignore[arg-type]
            dropout=dropout,
            gradient_checkpointing=gradient_checkpointing,
            fuse=fuse,
            seed=seed,
            timeout_s=timeout,
        )
    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    wide_console().print(report)
    raise typer.Exit(0 if report.ok else 1)
