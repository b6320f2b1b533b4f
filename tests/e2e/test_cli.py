"""The command line, as a real process: output and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config

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
    ran = run("verify", "gpt2", "--tp", 2, "--policy", policy)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    rows = {line[:35].strip(): line for line in ran.stdout.splitlines()}
    assert "fail" in rows["logits, evaluation"]
    assert "fail" in rows["gradients, one backward"]
    assert "FAIL" in ran.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("no_such_model",), "there is no such model"),
        (("gpt2", "--tp", 0), "positive integer"),
        (("gpt2", "--heads", 4, "--kv-heads", 3), "multiple of KV heads"),
        (("gpt2", "--kv-heads", 2), "no size for kv_heads"),
        (("gpt2", "--pp", 2, "--schedule", "zigzag"), "no such pipeline schedule"),
        (("gpt2", "--tp", 2, "--policy", "no_such_policy"), "no such policy"),
        (("mamba", "--tp", 2), "no policy serves"),
        (("gpt2", "--tp", "two"), "not a valid"),
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
    assert {file.stem for file in (ROOT / "policies").glob("*.yaml")} <= set(ran.stdout.split())
    assert "qwen3" in ran.stdout


def test_policy_show_gives_the_plan_of_a_model() -> None:
    ran = run("policy", "show", "gpt2", "--tp", 4, "--pp", 2)
    assert ran.returncode == 0, ran.stderr
    rows = {" ".join(line.split()) for line in ran.stdout.splitlines()}
    assert "transformer.h.*.attn.c_attn.weight (12) 768 x 2304 dim 1 in 3 parts: 4 x 576 1.688 MiB 0-1" in rows
    assert any(row.startswith("transformer.wte.weight = lm_head.weight 50257 x 768 dim 0: 12565, 12564,") for row in rows)
    assert "transformer.h.*.ln_1.bias (12) 768 whole 3 KiB 0-1" in rows
    assert sum(row[:1].isdigit() for row in rows) == 8  # ranks


def test_policy_show_takes_a_folder_and_refuses_sizes_that_do_not_fit(tmp_path: Path) -> None:
    GPT2Config(n_layer=2, n_head=4, n_embd=32).save_pretrained(tmp_path)
    shown = run("policy", "show", tmp_path, "--tp", 2)
    assert shown.returncode == 0, shown.stderr
    assert "transformer.h.*.attn.c_proj.weight (2)" in shown.stdout
    assert_refused(run("policy", "show", tmp_path, "--tp", 5), "fewer num_attention_heads")


def test_policy_check_passes_on_an_installed_policy() -> None:
    ran = run("policy", "check", "bert")
    assert (ran.returncode, ran.stdout.strip()) == (0, "bert: ok"), ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "policies").glob("*.yaml")))
def test_policy_check_passes_on_every_installed_policy(name: str) -> None:
    ran = run("policy", "check", name)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("extends: gpt2\nregions:\n  mlp:\n    rows: {c_proj: feature, c_none: feature}\n", 4, "matches nothing"),
        ("extends: gpt2\nmodels: [gpt2]\nregions:\n  mlp:\n    columns: {c_fc: head}\n", 5, ""),
        ("extends: gpt2\nmodels: [gpt2]\nregoins: {}\n", 3, "not valid"),
    ],
    ids=["rule without a match", "wrong unit", "unknown key"],
)
def test_policy_check_names_the_line_of_a_fault(tmp_path: Path, text: str, line: int, complaint: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text if "models" in text else f"{text}models: [gpt2]\n")
    ran = run("policy", "check", file)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert f"{file}:{line}" in ran.stdout
    assert complaint in ran.stdout


def test_policy_check_of_no_policy_is_bad_input() -> None:
    assert_refused(run("policy", "check", "no_such_policy"), "no such policy")
