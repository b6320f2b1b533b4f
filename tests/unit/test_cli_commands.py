"""The commands, called in this process: what they print, and their exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, Qwen3Config
from typer.testing import CliRunner, Result

from oslo_engine.cli.main import main

ROOT = Path(__file__).parent.parent.parent
POLICIES = sorted(file.stem for file in (ROOT / "policies").glob("[!_]*.yaml"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def assert_refused(ran: Result, complaint: str) -> None:
    assert ran.exit_code == 2, ran.output
    assert complaint in ran.output
    assert ran.output.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("gpt2", "--heads", 4, "--kv-heads", 3), "multiple of KV heads"),
        (("gpt2", "--kv-heads", 2), "no size for kv_heads"),
        (("gpt2", "--pp", 2, "--schedule", "zigzag"), "no such pipeline schedule"),
        (("gpt2", "--dropout", 1), "between 0 and 1"),
        (("gpt2", "--dtype", "int8"), "number format"),
        (("gpt2", "--tp", 2, "--policy", "no_such_policy"), "no such policy"),
        (("vit", "--tp", 2), "with a head"),
        (("llama", "--task", "masked"), "no masked language model"),
        (("gpt2", "--task", "tagging"), "no such task"),
        (("transformers:GPT2Modle",), "gives no config"),
        (("transformers:BertForMaskedLM", "--task", "causal"), "that of its class"),
        (("no_such_module:Model",), "No module named"),
    ],
    ids=str,
)
def test_bad_input_of_verify_is_refused_before_any_rank_starts(arguments: tuple[object, ...], complaint: str) -> None:
    assert_refused(run("verify", *arguments), complaint)


def test_policy_show_gives_the_plan_of_a_policy_s_first_model() -> None:
    ran = run("policy", "show", "gpt2", "--tp", 4, "--pp", 2)
    assert ran.exit_code == 0, ran.output
    rows = {" ".join(line.split()) for line in ran.output.splitlines()}
    assert "transformer.h.*.attn.c_attn.weight (12) 768 x 2304 dim 1 in 3 parts: 4 x 576 1.688 MiB 0-1" in rows
    assert any(row.startswith("transformer.wte.weight = lm_head.weight 50257 x 768 dim 0: 12565, 12564,") for row in rows)
    assert "transformer.h.*.ln_1.bias (12) 768 whole 3 KiB 0-1" in rows
    assert sum(row[:1].isdigit() for row in rows) == 10  # ranks and stages


def test_policy_show_counts_what_a_rank_holds() -> None:
    """All of the model together, and what both hold (norms, positions) twice."""
    output = run("policy", "show", "gpt2", "--tp", 2).output
    numbers = [int(line.split()[4].replace(",", "")) for line in output.splitlines() if line[:1].isdigit()]
    whole = 124_439_808
    assert len(numbers) == 2
    assert whole < sum(numbers) < 1.02 * whole


def test_policy_show_takes_a_folder_and_refuses_sizes_that_do_not_fit(tmp_path: Path) -> None:
    GPT2Config(n_layer=2, n_head=4, n_embd=32).save_pretrained(tmp_path)
    shown = run("policy", "show", tmp_path, "--tp", 2)
    assert shown.exit_code == 0, shown.output
    assert "transformer.h.*.attn.c_proj.weight (2)" in shown.output
    assert_refused(run("policy", "show", tmp_path, "--tp", 5), "fewer num_attention_heads")
    assert_refused(run("policy", "show", tmp_path, "--pp", 3), "fewer blocks")


def test_policy_show_marks_shared_heads_and_summed_gradients(tmp_path: Path) -> None:
    config = Qwen3Config(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=16, hidden_size=128)
    config.save_pretrained(tmp_path)
    output = " ".join(run("policy", "show", tmp_path, "--tp", 4).output.split())
    assert "self_attn.q_norm.weight (2) 16 whole, gradients summed" in output
    assert "self_attn.k_proj.weight (2) 32 x 128 dim 0: 4 x 16, shared ones summed" in output


def test_policy_check_passes_on_an_installed_policy() -> None:
    ran = run("policy", "check", "gpt2")
    told = ran.output.strip().splitlines()
    assert ran.exit_code == 0
    assert "gpt2: ok" in told
    assert all(line.endswith(": ok") for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_policy_check_passes_on_every_installed_policy(name: str) -> None:
    ran = run("policy", "check", name)
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        (
            "extends: gpt2\nmodels: [gpt2]\nregions:\n  mlp:\n    rows: {c_proj: feature, c_none: feature}\n",
            5,
            "matches nothing",
        ),
        ("extends: gpt2\nmodels: [gpt2]\nregions:\n  mlp:\n    rows:\n      c_proj: wing\n", 6, "unknown unit"),
        ("extends: gpt2\nmodels: [gpt2]\nregoins: {}\n", 3, "unknown key 'regoins'"),
        ("extends: gpt2\nmodels: [gpt2]\nvocabulary:\n  heads: [wte]\n", 4, "cut by two rules"),
    ],
    ids=["rule without a match", "unknown unit", "unknown key", "two rules"],
)
def test_policy_check_names_the_line_of_a_fault(tmp_path: Path, text: str, line: int, complaint: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    ran = run("policy", "check", file)
    assert ran.exit_code == 1, ran.output
    assert f"{file}:{line}" in ran.output
    assert complaint in ran.output


def test_policy_check_tells_wrong_words_and_what_matches_nothing_together(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "extends: gpt2\nmodels: [gpt2]\nregoins: {}\n"
        "vocabulary:\n  heads: [lm_haed]\n"
        "regions:\n  again:\n    at: mlp\n    colums: {c_fc: feature}\n    rows: {c_proj: feature}\n"
    )
    ran = run("policy", "check", file)
    assert ran.exit_code == 1
    places = {f"{file}:{line}" for line in (3, 5, 7, 9)}
    assert all(place in ran.output for place in places), ran.output
    for complaint in (
        "'regoins'",
        "did you mean 'columns'",
        "cut by two rules",
        "'lm_haed' of the vocabulary",
        "lm_head.weight",
    ):
        assert complaint in ran.output


def test_policy_check_takes_a_class_that_is_not_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "examples" / "custom_architecture")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "modeling", raising=False)
    ran = run("policy", "check", "heron.yaml", "--model", "modeling:HeronForCausalLM")
    assert (ran.exit_code, ran.output) == (0, "modeling:HeronForCausalLM: ok\n")


def test_policy_check_with_another_model_than_it_serves() -> None:
    ran = run("policy", "check", "bert", "--model", "gpt2")
    assert ran.exit_code == 1
    assert ran.output.startswith("gpt2: no stack of the policy")


def test_policy_check_of_no_policy_is_bad_input() -> None:
    assert_refused(run("policy", "check", "no_such_policy"), "no such policy")


def test_policy_show_says_which_blocks_a_stage_runs_and_why_something_stays_whole() -> None:
    stages = run("policy", "show", "t5", "--tp", "2", "--pp", "2").stdout
    assert "encoder.block 0-5, decoder.block 0-2" in stages
    whole = run("policy", "show", "xlstm", "--tp", "2").stdout
    assert "recurrent; its states are made for all heads" in whole
    assert "Pipeline stages" not in whole
