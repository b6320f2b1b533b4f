"""``oslo-engine fuse MODEL``."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from oslo_engine.cli.output import bad_input_ends, print_table, quiet_transformers


def fuse(
    model: Annotated[str, typer.Argument(help="Model type, folder or hub name: only its config is read.")],
    target: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="mlp, attention, norm or loss; may be given several times. By default all of them."),
    ] = None,
    attention: Annotated[
        str, typer.Option(help="eager, or sdpa: torch's kernel, of which there is nothing to fuse.")
    ] = "eager",
    task: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="causal, masked or seq2seq, where the architecture has several."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say where each kernel runs, what was left, and why.")] = False,
) -> None:
    """What ``model.fuse()`` finds in an architecture: tried on a tiny random model of it."""
    with bad_input_ends():
        import torch

        from oslo_engine.errors import PlanError
        from oslo_engine.fusion.fuse import fuse as fuse_model
        from oslo_engine.fusion.report import KERNELS
        from oslo_engine.tiny.fill import fill
        from oslo_engine.tiny.sizes import Sizes
        from oslo_engine.tiny.subject import find_subject

        if attention not in ("eager", "sdpa"):
            raise PlanError("no such attention", where="--attention", expected="eager or sdpa", got=attention)
        quiet_transformers()
        torch.manual_seed(0)
        subject = find_subject(model, task).shrunk(Sizes(), num_blocks=2)
        built = subject.build(lambda cls, config: cls._from_config(config, attn_implementation=attention))
        fill(built, 0)
        report = fuse_model(built, target or None)
    title = f"{report.model} (tiny, 2 blocks), {attention} attention"
    if explain:
        print_table(("kernel", "places", "where", "left because"), report.rows(), title)
    else:
        print_table(("kernel", "places"), [(KERNELS[name], number) for name, number in report.counts.items()], title)
    typer.echo(f"{len(report.replaced)} places fused, {len(report.left)} left.")
