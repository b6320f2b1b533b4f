"""``oslo-engine``: the command line. Commands import what they run when they are called, so that ``--help`` is quick."""

from __future__ import annotations

import typer

from oslo_engine.cli.checkpoint import checkpoint
from oslo_engine.cli.data import data
from oslo_engine.cli.fuse import fuse
from oslo_engine.cli.plan import plan
from oslo_engine.cli.policy import policy
from oslo_engine.cli.preprocess import preprocess
from oslo_engine.cli.serve import serve
from oslo_engine.cli.verify import verify

main = typer.Typer(
    name="oslo-engine",
    help="Train, generate with, serve and check Transformers models that are split across many devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
main.command("plan")(plan)
main.command("verify")(verify)
main.command("serve")(serve)
main.command("fuse")(fuse)
main.command("preprocess")(preprocess)
main.add_typer(policy, name="policy")
main.add_typer(checkpoint, name="checkpoint")
main.add_typer(data, name="data")
