"""``oslo-engine``: the command line. Commands import what they run when they are called, so that ``--help`` is quick."""

from __future__ import annotations

import typer

from oslo_engine.cli.checkpoint import checkpoint
from oslo_engine.cli.plan import plan
from oslo_engine.cli.policy import policy
from oslo_engine.cli.verify import verify

main = typer.Typer(
    name="oslo-engine",
    help="Train, generate with and check Transformers models that are split across many devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
main.command("plan")(plan)
main.command("verify")(verify)
main.add_typer(policy, name="policy")
main.add_typer(checkpoint, name="checkpoint")
