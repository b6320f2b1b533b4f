"""``oslo-engine checkpoint``, called in this process: what it writes and prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import BertConfig, GPT2LMHeadModel
from typer.testing import CliRunner, Result

from oslo_engine.cli import output
from oslo_engine.cli.main import main
from oslo_engine.policy.registry import find_policy
from split_models import MODELS, plan_of, whole_model, write_split


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def words(ran: Result) -> str:
    assert ran.exit_code == 0, ran.output
    return " ".join(ran.output.split())


def refused(ran: Result, *complaints: str) -> None:
    assert ran.exit_code == 2, ran.output
    assert ran.output.startswith("error: ")
    for complaint in complaints:
        assert complaint in ran.output


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    whole_model("gpt2").save_pretrained(tmp_path / "merged")
    return tmp_path / "merged"


@pytest.fixture
def split(tmp_path: Path) -> Path:
    write_split(whole_model("gpt2"), plan_of(*MODELS["gpt2"](), 2, 2), tmp_path / "split")
    return tmp_path / "split"


def test_split_reshard_and_merge_come_back_to_the_same_file(tmp_path: Path, merged: Path, split: Path) -> None:
    said = words(run("split", merged, tmp_path / "a", "--tp", 2, "--pp", 2))
    assert said.startswith(f"{tmp_path / 'a'}: 6 files, ")
    assert said.endswith("written")
    assert files(tmp_path / "a") == files(split) | {
        name: (merged / name).read_bytes() for name in ("config.json", "generation_config.json")
    }
    words(run("reshard", tmp_path / "a", tmp_path / "b", "--tp", 3, "--serialization", "torch"))
    assert (tmp_path / "b" / "pytorch_model_tp=2_pp=0.bin").exists()
    words(run("merge", tmp_path / "b", tmp_path / "c"))
    assert files(tmp_path / "c") == files(merged)
    words(run("merge", tmp_path / "b", tmp_path / "d", "--max-shard-size", "20KB"))
    assert (tmp_path / "d" / "model.safetensors.index.json").exists()


def test_nothing_is_written_by_a_dry_run(tmp_path: Path, merged: Path, split: Path) -> None:
    said = words(run("reshard", split, tmp_path / "a", "--tp", 2, "--pp", 2, "--dry-run"))
    size = (split / "model_tp=1_pp=1.safetensors").stat().st_size
    assert f"model_tp=1_pp=1.safetensors {size:,}" in said
    assert said.endswith("would be written; nothing was")
    said = words(run("merge", split, tmp_path / "a", "--dry-run"))
    assert f"model.safetensors {(merged / 'model.safetensors').stat().st_size:,}" in said
    assert not (tmp_path / "a").exists()


def test_a_checkpoint_is_only_replaced_if_asked(tmp_path: Path, merged: Path, split: Path) -> None:
    before = files(split)
    refused(run("split", merged, split, "--tp", 4), "has a checkpoint already", str(split), "--overwrite")
    refused(run("merge", split, merged), "has a checkpoint already")
    refused(run("split", merged, merged, "--overwrite"), "over itself")
    assert files(split) == before
    words(run("split", merged, split, "--tp", 4, "--overwrite"))
    assert not (split / "model_tp=0_pp=1.safetensors").exists()
    assert (split / "model_tp=3_pp=0.safetensors").exists()


def test_bad_input_is_refused(tmp_path: Path, merged: Path, split: Path) -> None:
    out = tmp_path / "out"
    refused(run("split", split, out), "split already", "tp=2 pp=2", "checkpoint reshard")
    refused(run("merge", merged, out), "not split")
    refused(run("split", tmp_path / "none", out), "no such checkpoint")
    refused(run("split", merged, out, "--tp", 5), "fewer")
    refused(run("split", merged, out, "--tp", 0), "tp")
    refused(run("split", merged, out, "--policy", "none_of_these"), "no such policy")
    refused(run("split", merged, out, "--serialization", "pickle"), "safetensors or torch")
    refused(run("info", tmp_path), "no checkpoint")
    assert not out.exists()


def test_an_altered_source_is_named_and_nothing_is_left(tmp_path: Path, split: Path) -> None:
    path = split / "model_tp=1_pp=0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for command in ("reshard", "merge"):
        refused(run(command, split, tmp_path / "out"), "altered", str(path))
    assert sorted(os.listdir(tmp_path)) == ["split"]


@pytest.mark.parametrize("serialization", ["safetensors", "torch"])
@pytest.mark.parametrize("command", ["reshard", "merge"])
def test_a_tensor_that_the_layout_does_not_list_is_not_lost(
    tmp_path: Path, split: Path, command: str, serialization: str
) -> None:
    words(run("reshard", split, tmp_path / "source", "--tp", 2, "--serialization", serialization))
    layout = json.loads((tmp_path / "source" / "layout.json").read_text())
    left_out = layout["tensors"].pop(3)["name"]
    (tmp_path / "source" / "layout.json").write_text(json.dumps(layout))
    refused(run(command, tmp_path / "source", tmp_path / "out"), left_out, "not listed", "source")
    assert sorted(os.listdir(tmp_path)) == ["source", "split"]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("command", ["reshard", "merge"])
def test_a_config_that_is_missing_is_named(tmp_path: Path, split: Path, command: str, name: str) -> None:
    (split / name).unlink()
    refused(run(command, split, tmp_path / "out"), "a config is missing", str(split / name))
    assert sorted(os.listdir(tmp_path)) == ["split"]


def test_an_edited_config_may_not_describe_another_model(tmp_path: Path, split: Path) -> None:
    config = json.loads((split / "config.json").read_text())
    for edited in ({"tie_word_embeddings": False}, {"n_layer": 1}, {"vocab_size": 7}):
        (split / "config.json").write_text(json.dumps(config | edited))
        refused(run("merge", split, tmp_path / "out"), "the config was edited", str(split / "config.json"), "reshard")
    (split / "config.json").write_text(json.dumps(config)[:100])
    refused(run("merge", split, tmp_path / "out"), "config cannot be read")
    (split / "config.json").write_text(json.dumps(config | {"resid_pdrop": 0.5}))
    words(run("merge", split, tmp_path / "out"))
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "out").config.resid_pdrop == 0.5


def test_what_is_tied_no_more_is_written_twice(tmp_path: Path, split: Path) -> None:
    config = json.loads((split / "config.json").read_text())
    (split / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    words(run("reshard", split, tmp_path / "untied", "--tp", 2))
    words(run("merge", tmp_path / "untied", tmp_path / "out"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["transformer.wte.weight"])
    assert run("verify", tmp_path / "out").exit_code == 0


def test_a_file_of_the_user_is_only_replaced_if_asked(tmp_path: Path, split: Path) -> None:
    (split / "tokenizer.json").write_text("of the checkpoint")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("mine")
    for command in ("reshard", "merge"):
        refused(run(command, split, tmp_path / "out"), "would be replaced", "tokenizer.json", "--overwrite")
    assert files(tmp_path / "out").keys() == {"tokenizer.json"}
    words(run("merge", split, tmp_path / "out", "--overwrite"))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "of the checkpoint"


def test_a_checkpoint_that_appears_meanwhile_is_only_replaced_if_asked(
    tmp_path: Path, split: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oslo_engine.checkpoint import folder

    real = folder.begin

    def late(target: Path) -> Path:
        target.mkdir()
        (target / "model.safetensors").write_text("another's")
        return real(target)

    monkeypatch.setattr(folder, "begin", late)
    for number, command in enumerate(("reshard", "merge")):
        refused(run(command, split, tmp_path / str(number)), "has a checkpoint already")
        assert files(tmp_path / str(number)) == {"model.safetensors": b"another's"}
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "split"]


@pytest.mark.parametrize("command", ["split", "reshard", "merge"])
def test_an_empty_argument_is_not_the_current_folder(tmp_path: Path, split: Path, command: str) -> None:
    for folders in ((split, ""), ("", tmp_path / "out")):
        ran = run(command, *folders)
        assert ran.exit_code == 2
        assert "it is empty" in ran.output
    for checking in ("verify", "info"):
        assert "it is empty" in run(checking, "").output


def test_a_size_of_files_is_positive(tmp_path: Path, split: Path) -> None:
    for size in ("-5GB", "0", "some"):
        refused(run("merge", split, tmp_path / "out", f"--max-shard-size={size}"), "no such size of files", size)
    words(run("merge", split, tmp_path / "out", "--max-shard-size=0.5GB"))


def test_a_full_disk_is_an_error_that_leaves_the_old_checkpoint(
    tmp_path: Path, split: Path, merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oslo_engine.checkpoint.safetensors_io import SafetensorsWriter

    def full(self: object, view: object) -> None:
        raise OSError(28, "No space left on device")

    before = files(split)
    monkeypatch.setattr(SafetensorsWriter, "write", full)
    refused(run("split", merged, split, "--tp", 1, "--overwrite"), "No space left on device", str(split))
    assert files(split) == before
    assert sorted(os.listdir(tmp_path)) == ["merged", "split"]


# -- verify


def test_verify_passes_on_whole_checkpoints(tmp_path: Path, merged: Path, split: Path) -> None:
    assert "names, shapes, ties and checksums, of its config too" in words(run("verify", split))
    assert "Not its values and its config: it has no checksums" in words(run("verify", merged))


def test_verify_of_a_checkpoint_from_before_configs_had_checksums(split: Path) -> None:
    layout = json.loads((split / "layout.json").read_text())
    del layout["configs"]
    (split / "layout.json").write_text(json.dumps(layout))
    assert "Not its config, which has none" in words(run("verify", split))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_verify_finds_a_config_that_was_altered_or_is_missing(tmp_path: Path, split: Path, name: str) -> None:
    config = json.loads((split / name).read_text())
    (split / name).write_text(json.dumps(config | {"eos_token_id": 7}))
    wrong(split, "a config was altered", str(split / name))
    assert run("reshard", split, tmp_path / "meant", "--tp", 1).exit_code == 0
    assert "ok" in words(run("verify", tmp_path / "meant"))
    if name != "config.json":
        (split / name).unlink()
        wrong(split, "a config is missing", str(split / name))


def test_verify_finds_values_that_are_tied_no_more(merged: Path) -> None:
    tensors = load_file(merged / "model.safetensors")
    name, tied = "transformer.wte.weight", "lm_head.weight"
    save_file({**tensors, tied: tensors[name].clone()}, merged / "model.safetensors", {"format": "pt"})
    assert run("verify", merged).exit_code == 0
    altered = tensors[name].clone()
    altered[-1, -1] += 1
    save_file({**tensors, tied: altered}, merged / "model.safetensors", {"format": "pt"})
    wrong(merged, "tied parameters have different values", tied)


def wrong(folder: Path, *complaints: str) -> None:
    ran = run("verify", folder)
    assert ran.exit_code == 1, ran.output
    assert ran.output.startswith(f"{folder}: ")
    for complaint in complaints:
        assert complaint in ran.output


def test_verify_finds_what_is_wrong(tmp_path: Path, merged: Path, split: Path) -> None:
    path = split / "model_tp=1_pp=1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    wrong(split, "altered", str(path))
    path.unlink()
    wrong(split, "missing", str(path))
    os.truncate(merged / "model.safetensors", 1000)
    wrong(merged, "model.safetensors")
    refused(run("verify", tmp_path / "none"), "no such checkpoint")


def test_verify_compares_with_the_model_of_the_config(merged: Path, split: Path) -> None:
    for folder in (merged, split):
        BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder)
    wrong(merged, "lacks tensors of BertForMaskedLM", str(merged))
    wrong(split, "config was altered", "config.json")
    layout = json.loads((split / "layout.json").read_text())
    (split / "layout.json").write_text(json.dumps(layout | {"configs": {}}))
    wrong(split, "config is that of another model", "config.json")


# -- info


def test_info_of_a_split_checkpoint(split: Path) -> None:
    said = words(run("info", split))
    assert "form split, safetensors" in said
    assert "layout tp=2 pp=2" in said
    assert "policy gpt2 (hash " in said
    assert "model GPT2LMHeadModel" in said
    assert "model_tp=1_pp=1.safetensors" in said
    assert "transformer.h.*.attn.c_attn.weight (4) 24 x 72 float32 27 KiB dim 1 in 3 parts: 2 x 36 0-1" in said
    assert "transformer.wte.weight = lm_head.weight 131 x 24 float32 12.28 KiB dim 0: 66, 65 0-1" in said


def test_info_of_other_forms(tmp_path: Path, merged: Path) -> None:
    said = words(run("info", merged))
    assert "form whole, safetensors" in said
    assert "model GPT2LMHeadModel" in said
    assert "transformer.h.*.attn.c_attn.weight (4) 24 x 72 float32 27 KiB" in said
    torch.save({"a.0.b": torch.ones(2), "a.1.b": torch.ones(2), "c": torch.tensor(1)}, tmp_path / "pytorch_model.bin")
    said = words(run("info", tmp_path))
    assert "form whole, torch model not known" in said
    assert "a.*.b (2) 2 float32 16 B c one number int64 8 B" in said


# -- how


def test_the_policy_can_be_named(tmp_path: Path, merged: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: gpt2\nname: mine\nmodels: [gpt2]\n")
    words(run("split", merged, tmp_path / "a", "--tp", 2, "--policy", tmp_path / "mine.yaml"))
    assert "policy mine" in words(run("info", tmp_path / "a"))
    assert find_policy(None, "gpt2").name == "gpt2"


def test_bytes_are_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with output.byte_progress("working") as progress:
        assert progress is None
    real = Console

    def terminal(**options: object) -> Console:
        return real(**options | {"force_terminal": True, "width": 100})  # type: ignore[arg-type]

    monkeypatch.setattr("rich.console.Console", terminal)
    with output.byte_progress("working") as progress:
        assert progress is not None
        progress(5_000_000, 10_000_000)
        progress(10_000_000, 10_000_000)
    shown = capsys.readouterr()
    assert "working" in shown.err
    assert "10.0/10.0 MB" in shown.err
    assert shown.out == ""


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from oslo_engine.cli.main import main; main(['checkpoint', '--help'], standalone_mode=False); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip().splitlines()[-1] == "set()"
