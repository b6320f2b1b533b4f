"""The command line, as a real process: output and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oslo_engine.cli.main import main

ROOT = Path(__file__).parent.parent.parent
PROGRAM = Path(sys.executable).parent / "oslo-engine"

# q, k and v of c_attn are cut as if they were one projection: every shape fits, and rank 0 computes with Q and half of K.
NAIVE_QKV = """
extends: gpt2
models: [gpt2]
regions:
  attention:
    columns: {c_attn: head}
"""


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAM)] if PROGRAM.exists() else [sys.executable, "-c", "from oslo_engine.cli.main import main; main()"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=110, cwd=cwd or ROOT, env=environment
    )


def assert_refused(ran: subprocess.CompletedProcess[str], complaint: str) -> None:
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert complaint in ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    ran = run("--help")
    assert ran.returncode == 0
    assert {"verify", "policy"} <= set(ran.stdout.split())
    code = "import sys, oslo_engine.cli.main; print({'torch', 'transformers', 'rich.table', 'pydantic'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


def test_verify_passes_on_a_model_that_is_split_right(tmp_path: Path) -> None:
    ran = run("verify", "gpt2", "--tp", 2, "--json", tmp_path / "report.json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    last = ran.stdout.strip().splitlines()[-1]
    assert last.startswith("PASS  GPT2LMHeadModel (gpt2)  tp=2 pp=1")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] is True
    assert {"logits, evaluation", "gradients, one backward", "checkpoint, split, same layout"} <= {
        each["name"] for each in report["rows"] if each["verdict"] == "pass"
    }


def test_verify_fails_on_a_policy_that_runs_and_is_wrong(tmp_path: Path) -> None:
    policy = tmp_path / "naive.yaml"
    policy.write_text(NAIVE_QKV)
    ran = CliRunner().invoke(
        main, ["verify", "gpt2", "--tp", "2", "--policy", str(policy)]
    )  # a process would start more slowly
    assert ran.exit_code == 1, ran.output
    rows = {line[:35].strip(): line for line in ran.output.splitlines()}
    assert " fail " in rows["logits, evaluation"]
    assert " fail " in rows["gradients, one backward"]
    assert ran.output.strip().splitlines()[-1].startswith("FAIL  GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("no_such_model",), "there is no such model"),
        (("gpt2", "--tp", 0), "positive integer"),
        (("gpt2", "--tp", "two"), "Invalid value for '--tp'"),
    ],
    ids=str,
)
def test_bad_input_of_verify_is_exit_code_2_and_a_message(arguments: tuple[object, ...], complaint: str) -> None:
    assert_refused(run("verify", *arguments), complaint)


@pytest.mark.slow
def test_more_ranks_than_heads_are_refused_by_the_ranks() -> None:
    assert_refused(run("verify", "gpt2", "--tp", 5), "fewer num_attention_heads")


def test_policy_list_names_every_policy_and_what_it_serves() -> None:
    ran = run("policy", "list")
    assert ran.returncode == 0
    assert {file.stem for file in (ROOT / "policies").glob("[!_]*.yaml")} <= set(ran.stdout.split())
    assert "qwen3" in ran.stdout
