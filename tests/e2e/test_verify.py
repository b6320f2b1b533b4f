"""``oslo.verify`` on real ranks: what is right passes in every combination, what is broken on purpose fails where it should."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import FalconConfig, GPT2Config, GPTBigCodeConfig

import oslo_engine as oslo
from sabotage import saboteur

# What each sabotage must make fail; rows that fail besides are its consequences.
QUICK = {
    "gradients_of_norms_not_summed": ({"tp": 2}, "gradients, one backward"),
    "clipping_forgotten": ({"tp": 2}, "weights after 3 AdamW steps"),
    "last_token_chosen_by_another_rule": ({"tp": 2}, "generation, greedy"),
    "a_slice_is_loaded_wrong": ({"tp": 2}, "checkpoint, split, same layout"),
    "same_masks_on_all_ranks": ({"tp": 2, "dropout": 0.1}, "dropout, masks of tp ranks"),
}
SLOW = {
    "row_bias_on_every_rank": ({"tp": 2}, "logits, evaluation"),
    "tied_gradients_not_summed": ({"pp": 2}, "gradients, train_step"),
    "micro_batches_weigh_the_same": ({"pp": 2}, "loss, micro-batch loop"),
    "replicated_gradients_counted_twice": ({"tp": 2}, "gradient norm"),
    "different_masks_on_shared_activations": ({"tp": 2, "dropout": 0.1}, "dropout, activations of tp ranks"),
    "same_masks_every_step": ({"tp": 2, "dropout": 0.1}, "dropout, other masks every step"),
    "nothing_is_dropped": ({"tp": 2, "dropout": 0.1}, "dropout, other masks every step"),
    "a_new_seed_every_time": ({"tp": 2, "dropout": 0.1}, "dropout, same seed, same loss"),
    "recompute_draws_new_masks": ({"tp": 2, "dropout": 0.1}, "dropout, gradients when recomputed"),
}
# Only these rows may fail for these: everything else must not depend on what was broken.
ALONE = {
    "clipping_forgotten",
    "same_masks_on_all_ranks",
    "same_masks_every_step",
    "a_new_seed_every_time",
    "recompute_draws_new_masks",
}
SABOTAGES = [
    *(pytest.param(how, *expected, id=how) for how, expected in QUICK.items()),
    *(pytest.param(how, *expected, id=how, marks=pytest.mark.slow) for how, expected in SLOW.items()),
]

FAMILIES = ["gpt2", "llama", "qwen3", "bert", "roberta", "t5"]
COMBINATIONS: list[tuple[Any, dict[str, Any]]] = [
    *((name, {"tp": 2, "pp": 2}) for name in FAMILIES),
    *((name, {"tp": 2, "pp": 2, "dropout": 0.1}) for name in FAMILIES),
    *((name, {"tp": 3}) for name in FAMILIES),
    *((name, {"pp": 4}) for name in FAMILIES),
    *((name, {"tp": 2, "pp": 2, "sequence_parallel": True}) for name in FAMILIES),
    *(("gpt2", {"pp": 2, "schedule": schedule}) for schedule in ("gpipe", "interleaved", "zero-bubble", "zero-bubble-v")),
    ("t5", {"tp": 2, "pp": 2, "schedule": "zero-bubble-v"}),
    ("bert", {"tp": 2, "pp": 2, "schedule": "interleaved", "micro_batch_size": 1}),
    ("llama", {"tp": 4, "kv_heads": 2}),
    ("llama", {"tp": 4, "kv_heads": 1, "dropout": 0.1}),
    ("llama", {"tp": 2, "heads": 9, "kv_heads": 3}),
    ("gpt2", {"tp": 4, "vocab": 131}),
    ("gpt2", {"tp": 2, "pp": 2, "tied": False}),
    ("llama", {"tp": 2, "pp": 2, "tied": True}),
    ("roberta", {"tp": 2, "pp": 2, "tied": False}),
    ("gpt2", {"tp": 2, "pp": 2, "gradient_checkpointing": True}),
    ("t5", {"tp": 2, "gradient_checkpointing": True, "dropout": 0.1}),
    *((name, {"tp": 2, "pp": 2, "dtype": "bfloat16"}) for name in ("gpt2", "llama", "t5")),
    ("gpt2", {"tp": 2, "pp": 2, "dtype": "float64"}),
    ("t5", {"tp": 2, "dtype": "float16"}),
    ("gemma3_text", {"tp": 2, "pp": 2}),
    ("gpt2", {}),
    (FalconConfig(new_decoder_architecture=True, num_attention_heads=16, num_kv_heads=4, hidden_size=256), {"tp": 2, "pp": 2}),
    (FalconConfig(alibi=True, multi_query=False, parallel_attn=False, bias=True), {"tp": 2, "pp": 2}),
    (GPTBigCodeConfig(multi_query=False), {"tp": 3}),
    (GPT2Config(n_layer=3, n_head=5, n_embd=40, vocab_size=77, n_positions=32), {"tp": 2, "full_size": True}),
]


def row(report: Any, name: str) -> Any:
    return next(each for each in report.rows if each.name == name)


def test_model_that_is_split_right_passes_every_check() -> None:
    report = oslo.verify("gpt2", tp=2, pp=2)
    assert report.ok, str(report)
    assert {each.verdict for each in report.rows if not each.name.startswith("dropout")} == {"pass"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    COMBINATIONS,
    ids=[f"{getattr(name, 'model_type', name)}-{settings}" for name, settings in COMBINATIONS],
)
def test_every_combination_passes(name: Any, settings: dict[str, Any]) -> None:
    report = oslo.verify(name, **settings)
    assert report.ok, str(report)


@pytest.mark.parametrize(("how", "settings", "expected"), SABOTAGES)
def test_sabotage_is_noticed(how: str, settings: dict[str, Any], expected: str) -> None:
    report = oslo.verify(saboteur(how), **settings)
    assert not report.ok
    assert row(report, expected).verdict == "fail", str(report)
    if how in ALONE:
        assert [each.name for each in report.rows if each.verdict == "fail"] == [expected], str(report)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"tp": 2}, {"tp": 2, "dropout": 0.1}])
def test_saboteur_that_does_nothing_passes(settings: dict[str, Any]) -> None:
    report = oslo.verify(saboteur("nothing"), **settings)
    assert report.ok, str(report)


def test_rank_that_raises_ends_the_run_with_its_traceback() -> None:
    started = time.monotonic()
    report = oslo.verify(saboteur("a_rank_raises"), tp=2, timeout_s=100)
    assert not report.ok
    assert "ZeroDivisionError" in report.errors[1]
    assert "sabotage.py" in report.errors[1]
    assert set(report.errors) == {0, 1}
    assert row(report, "generation, greedy").detail == "ZeroDivisionError: division by zero, rank 1"
    assert row(report, "gradient norm").verdict == "pass"  # what was known before stays
    assert row(report, "checkpoint, merged, other layout").verdict == "not run"
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_rank_that_dies_ends_the_run() -> None:
    report = oslo.verify(saboteur("a_rank_dies"), tp=2, timeout_s=100)
    assert report.errors[1] == "died with exit code 7"
    assert not report.ok


@pytest.mark.slow
def test_rank_that_hangs_ends_the_run_when_the_time_is_up_and_shows_where_all_stood() -> None:
    started = time.monotonic()
    report = oslo.verify(saboteur("a_rank_sleeps"), tp=2, timeout_s=20)
    assert not report.ok
    assert time.monotonic() - started < 40
    assert "no result within 20 s" in report.errors[1]
    assert "sabotage.py" in report.errors[1]
    assert "agreement.py" in report.errors[0]  # waits for rank 1's broadcast
    assert row(report, "generation, greedy").verdict == "not run"


def test_ranks_and_their_folder_are_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = oslo.verify(saboteur("a_rank_raises"), tp=2)
    assert not report.ok
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("rank ")]
    assert not list(tmp_path.glob("oslo-verify-*"))


@pytest.mark.parametrize(
    ("model", "settings", "complaint"),
    [
        ("gpt2", {"tp": 5}, "fewer num_attention_heads"),
        ("gpt2", {"pp": 4, "layers": 2}, "fewer blocks"),
        ("t5", {"tp": 2, "tied": False}, "does not untie"),
        (GPT2Config(), {"tp": 2, "policy": "bert"}, "no stack of the policy"),
        ("voxtral_realtime", {"tp": 2}, "does not run on text alone"),
    ],
)
def test_model_that_cannot_be_split_so_is_refused(model: Any, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(oslo.OsloError, match=complaint):
        oslo.verify(model, **settings)


@pytest.mark.slow
def test_script_without_a_main_guard_is_run_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import oslo_engine as oslo\nprint('started')\nprint(oslo.verify('gpt2', tp=2).ok)\n")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=110)
    assert ran.stdout.split() == ["started", "True"], ran.stderr
