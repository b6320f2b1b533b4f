"""``oslo-engine policy list | show | check | derive``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from oslo_engine.cli.output import bad_input_ends, print_table, quiet_transformers
from oslo_engine.errors import OsloError

if TYPE_CHECKING:
    from oslo_engine.policy.schema import Policy
    from oslo_engine.tiny.subject import Subject

policy = typer.Typer(name="policy", help="How architectures are split.", no_args_is_help=True)


@policy.command("list")
def list_policies() -> None:
    """Every architecture: its policy, and what came out when it was last split and compared with the unsplit model."""
    with bad_input_ends():
        from oslo_engine.policy.coverage import layouts, status_of_architectures
        from oslo_engine.policy.registry import policies_by_model_type

        served, found = policies_by_model_type(), status_of_architectures()
    proved = {name.partition("/")[2] for name in found}
    rows = [
        (*reversed(name.split("/")), served[kind].name if (kind := name.partition("/")[2]) in served else "", *statuses)
        for name, statuses in found.items()
    ]
    rows += [(kind, "", policy.name, *[""] * len(layouts())) for kind, policy in served.items() if kind not in proved]
    print_table(("model type", "task", "policy", *layouts()), sorted(rows))
    typer.echo(f"{len(served)} model types have a policy; docs/coverage.md has the reasons behind what is not passed.")


@policy.command()
def show(
    name: Annotated[str, typer.Argument(help="A policy, or a model: model type, folder or hub name.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 2,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.")] = 1,
    schedule: Annotated[str, typer.Option(help="Pipeline schedule.")] = "1f1b",
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel")] = False,
    expert_split: Annotated[str, typer.Option(help="inner: cut every expert; expert: deal whole experts.")] = "inner",
    policy: Annotated[Optional[str], typer.Option(help="Name or YAML file, for a model.")] = None,  # noqa: UP045
) -> None:
    """The plan of a model at its config's size: how each parameter splits, what a rank holds of it, and on which stages."""
    with bad_input_ends():
        from oslo_engine.cli.plan_table import plan_rows, rank_rows, stage_rows, whole_rows
        from oslo_engine.policy.registry import find_policy, installed_names, installed_policy
        from oslo_engine.tiny.subject import find_subject
        from oslo_engine.verify.planned import plan_of

        quiet_transformers()
        is_policy = policy is None and name in installed_names()
        subject = find_subject(installed_policy(name).models[0] if is_policy else name)
        chosen = installed_policy(name) if is_policy else find_policy(policy, subject.config.model_type)
        plan = plan_of(
            subject,
            chosen,
            tp=tp,
            pp=pp,
            schedule=schedule,
            sequence_parallel=sequence_parallel,
            expert_split=expert_split,
        )
    sizes = f"tp={tp} pp={pp}" + (f" {schedule}" if pp > 1 else "")
    print_table(
        ("parameter", "shape", "split over tp", "bytes per rank", "stages"),
        plan_rows(plan),
        f"{plan.model}, {plan.policy}, {sizes}, {plan.parameters[0].dtype}",
    )
    typer.echo(
        "(32): in so many blocks. dim 0: 4 x 8: along its first dimension each of 4 tp ranks has 8 entries. whole: every tp "
        "rank has all of it; gradients summed: and computes a part of its gradient.\n"
    )
    if plan.replicated:
        print_table(("whole on purpose", "why"), whole_rows(plan))
        typer.echo()
    if plan.num_stages > 1:
        print_table(("stage", "pp", "blocks"), stage_rows(plan), "Pipeline stages")
        typer.echo()
    print_table(("rank", "pp", "tp", "stages", "parameters", "bytes"), rank_rows(plan), "Ranks of one copy of the model")


@policy.command()
def check(
    name: Annotated[str, typer.Argument(help="An installed policy, or a YAML file.")],
    model: Annotated[
        Optional[str], typer.Option(help="Check with this model only: model type, folder or hub name.")  # noqa: UP045
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 2,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.")] = 2,
) -> None:
    """Match a policy with a tiny model of each model type that it serves.

    Every rule must match, every parameter be claimed at most once, every size be divisible. All faults are told at once;
    where the file itself has some, what is wrong in it is read as what was probably meant, or left out, for the rest.

    Exit code: 0, 1 if something does not fit, 2 for bad input.
    """
    with bad_input_ends():
        from oslo_engine.policy.loader import Reading
        from oslo_engine.policy.registry import installed_names, installed_policy, read_policy_file
        from oslo_engine.policy.schema_faults import joined

        if name not in installed_names() and not Path(name).is_file():
            raise OsloError("no such policy", got=name, expected=f"a YAML file, or one of: {', '.join(installed_names())}")
    try:
        reading = read_policy_file(Path(name)) if Path(name).is_file() else Reading(installed_policy(name))
    except OsloError as error:
        typer.echo(f"{name}: {error}")
        raise typer.Exit(1) from None
    if failed := bool(reading.faults):
        typer.echo(f"{name}: {joined(reading.faults, 'the file')}")
    if (checked := reading.policy) is None:
        raise typer.Exit(1)
    for kind in [model] if model else checked.models:
        problem = _problem(checked, kind, tp, pp)
        failed |= problem is not None
        typer.echo(f"{kind}: ok" if problem is None else f"{kind}: {problem}")
    raise typer.Exit(1 if failed else 0)


@policy.command()
def derive(
    model: Annotated[str, typer.Argument(help="Model type, folder or hub name.")],
    task: Annotated[Optional[str], typer.Option(help="causal, masked or seq2seq.")] = None,  # noqa: UP045
    output: Annotated[Optional[Path], typer.Option(help="YAML file to write; otherwise it is printed.")] = None,  # noqa: UP045
) -> None:
    """Find out how an architecture may be split, from what depends on what in tiny models of it.

    The result is a proposal: run ``oslo-engine verify MODEL --policy FILE --tp 2`` before you use it.

    Exit code: 0, 2 for bad input.
    """
    with bad_input_ends():
        from oslo_engine.derive import derive as derive_policy
        from oslo_engine.tiny.subject import find_subject

        quiet_transformers()
        subject = find_subject(model, task)
        derived = derive_policy(subject)
        if output is not None:
            output.write_text(derived.yaml, encoding="utf-8")
    for note in derived.notes:
        typer.echo(f"not decided: {note}", err=True)
    if output is None:
        typer.echo(derived.yaml, nl=False)
    typer.echo(
        f"{output or 'this'} is a proposal; run verify with it. {_told_of_share(subject, derived.policy)}", err=output is None
    )


def _told_of_share(subject: Subject, policy: Policy) -> str:
    """How much of the model tensor parallelism divides: of a proposal that is right and of no use, this is what shows it."""
    from oslo_engine.verify.planned import plan_of

    try:
        plan = plan_of(subject, policy, tp=2, pp=1)
    except OsloError as error:
        return f"At this model's size it cannot be used: {error.what}."
    inside = [tensor for tensor in plan.parameters if tensor.name.startswith(tuple(f"{block}." for block in plan.blocks))]
    total = sum(math.prod(tensor.shape) for tensor in inside)
    divided = sum(math.prod(tensor.shape) for tensor in inside if tensor.shard is not None)
    return f"Tensor parallelism divides {divided / max(1, total):.0%} of the weights in blocks."


def _problem(checked: Policy, kind: str, tp: int, pp: int) -> OsloError | None:
    from oslo_engine.tiny.sizes import Sizes
    from oslo_engine.tiny.subject import find_subject
    from oslo_engine.verify.planned import plan_of
    from oslo_engine.verify.settings import Settings

    quiet_transformers()
    try:
        settings = Settings(tp=tp, pp=pp, policy=checked)
        subject = find_subject(kind).shrunk(Sizes(), num_blocks=settings.num_blocks)
        plan_of(subject, checked, tp=tp, pp=pp)
    except OsloError as error:
        return error
    return None
