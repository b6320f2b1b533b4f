"""From any layout to any other, in one process: the files are those that a save at that layout writes."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, GPT2Config, LlamaConfig, PreTrainedModel

from oslo_engine.checkpoint import reshard as module
from oslo_engine.checkpoint import stream
from oslo_engine.checkpoint.atomic import staging_folder
from oslo_engine.checkpoint.folder import Verification
from oslo_engine.checkpoint.merge import merge
from oslo_engine.checkpoint.policy_hash import hash_of_policy, warn_of_another_policy
from oslo_engine.checkpoint.reshard import reshard
from oslo_engine.checkpoint.save import write_config
from oslo_engine.checkpoint.source import open_source
from oslo_engine.errors import CheckpointError, PlanError, PolicyError, UnsupportedError
from oslo_engine.policy.registry import find_policy
from oslo_engine.tiny.fill import fill
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.subject import find_subject
from split_models import MODELS, plan_of, whole_model, write_split

KINDS = ("gpt2", "llama", "gpt_neox", "phi3", "mixtral", "t5", "bert")
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (4, 1), (1, 4))
IN_BFLOAT16 = {"llama", "mixtral"}


def tiny(kind: str) -> PreTrainedModel:
    """Of the kind, with 4 blocks in each stack, 4 heads, and 2 KV heads where it groups them."""
    subject = find_subject(kind).shrunk(Sizes(), num_blocks=4)
    model: PreTrainedModel = subject.build(lambda cls, config: cls(config))
    fill(model, 0)
    return model.to(torch.bfloat16 if kind in IN_BFLOAT16 else torch.float32).eval()


def weights(folder: Path) -> dict[str, bytes]:
    """The files that are weights or say where they are, by name."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix in (".safetensors", ".bin") or path.name in ("layout.json", "model.safetensors.index.json")
    }


class Folders:
    """One model as ``save_pretrained`` writes it ("merged"), and as ranks at every layout would save it ("2x1")."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self.folder = folder
        model.save_pretrained(folder / "merged")
        for tp, pp in LAYOUTS:
            write_split(model, plan_of(type(model), model.config, tp, pp), folder / f"{tp}x{pp}")
        self.right = {path.name: weights(path) for path in folder.iterdir()}

    def check(self, source: str, target: tuple[int, int] | None) -> None:
        out = self.folder / "out"
        if target is None:
            merge(self.folder / source, out, overwrite=True)
        else:
            reshard(self.folder / source, out, tp=target[0], pp=target[1], overwrite=True)
        right = self.right["merged" if target is None else "{}x{}".format(*target)]
        found = weights(out)
        assert sorted(found) == sorted(right)
        assert [name for name in right if found[name] != right[name]] == [], f"{source} to {target}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_was_edited_and_still_fits_does_not_hinder_a_merge(tmp_path: Path, kind: str) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path / "merged")
    reshard(tmp_path / "merged", tmp_path / "split", tp=2, pp=2)
    config = json.loads((tmp_path / "split" / "config.json").read_text())
    (tmp_path / "split" / "config.json").write_text(json.dumps(config | {"bos_token_id": 3}))
    merge(tmp_path / "split", tmp_path / "out")
    assert weights(tmp_path / "out") == weights(tmp_path / "merged")


@pytest.fixture(scope="module", params=KINDS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp(request.param), tiny(request.param))


@pytest.fixture
def many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes most of the time of a tiny model: planning anew, and waiting for the disk.

    Its tensors are copied in several steps, as those of a large one.
    """
    monkeypatch.setattr(stream, "BUFFER_BYTES", 3000)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def plan(model: PreTrainedModel, policy: Any, topology: Any, expert_split: str) -> Any:
        return plan_of(type(model), model.config, topology.tp, topology.pp)

    monkeypatch.setattr(module, "_plan", plan)


@pytest.mark.usefixtures("many_at_once")
def test_every_layout_becomes_another_and_the_merged_one(folders: Folders) -> None:
    """Each is a source and a target; the slow test has all pairs."""
    for layout in LAYOUTS:
        folders.check("merged", layout)
        folders.check("{}x{}".format(*layout), None)
    for source, target in zip(LAYOUTS, (*LAYOUTS[3:], *LAYOUTS[:3]), strict=True):
        folders.check("{}x{}".format(*source), target)


@pytest.mark.slow
@pytest.mark.usefixtures("many_at_once")
@pytest.mark.timeout(600)
def test_every_layout_becomes_every_other(folders: Folders) -> None:
    for source, target in itertools.product(LAYOUTS, LAYOUTS):
        folders.check("{}x{}".format(*source), target)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_bin_files_can_be_the_source_and_the_target(tmp_path: Path, kind: str) -> None:
    model = tiny(kind)
    for tp, pp in ((2, 2), (3, 1)):
        plan = plan_of(type(model), model.config, tp, pp)
        write_split(model, plan, tmp_path / f"bin {tp}{pp}", "torch")
        write_split(model, plan, tmp_path / f"safe {tp}{pp}")
    reshard(tmp_path / "bin 22", tmp_path / "a", tp=3, pp=1)
    assert weights(tmp_path / "a") == weights(tmp_path / "safe 31")
    reshard(tmp_path / "safe 22", tmp_path / "b", tp=3, pp=1, serialization="torch")
    assert weights(tmp_path / "b") == weights(tmp_path / "bin 31")
    reshard(tmp_path / "bin 31", tmp_path / "c", tp=2, pp=2, serialization="torch")
    assert weights(tmp_path / "c") == weights(tmp_path / "bin 22")


def test_every_form_of_a_merged_checkpoint_can_be_split(tmp_path: Path) -> None:
    model = whole_model("gpt2")
    write_split(model, plan_of(*MODELS["gpt2"](), 2, 2), tmp_path / "right")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    write_config(model, tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    for form in ("sharded", "bin"):
        reshard(tmp_path / form, tmp_path / f"{form} split", tp=2, pp=2)
        assert weights(tmp_path / f"{form} split") == weights(tmp_path / "right")


def test_names_that_loading_changed_come_back_in_the_merged_form(tmp_path: Path) -> None:
    model = whole_model("bert")
    model.save_pretrained(tmp_path / "old")
    path = tmp_path / "old" / "model.safetensors"
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(old, path, {"format": "pt"})
    before = weights(tmp_path / "old")
    reshard(tmp_path / "old", tmp_path / "a", tp=2, pp=2)
    reshard(tmp_path / "a", tmp_path / "b", tp=3, pp=1)
    merge(tmp_path / "b", tmp_path / "merged")
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(old)
    assert weights(tmp_path / "merged") == before


def test_experts_are_cut_or_dealt_and_come_back_from_both(tmp_path: Path) -> None:
    model = tiny("mixtral")
    model.save_pretrained(tmp_path / "merged")
    for split in ("inner", "expert"):
        reshard(tmp_path / "merged", tmp_path / split, tp=2, pp=1, expert_split=split)
        merge(tmp_path / split, tmp_path / f"{split} merged")
        assert weights(tmp_path / f"{split} merged") == weights(tmp_path / "merged")
    assert weights(tmp_path / "inner") != weights(tmp_path / "expert")
    reshard(tmp_path / "expert", tmp_path / "back", tp=2, pp=1)
    assert weights(tmp_path / "back") == weights(tmp_path / "inner")


def test_what_the_class_makes_itself_need_not_be_there(tmp_path: Path) -> None:
    """Sinusoids are in no merged checkpoint, but in a split one, as in a save."""
    from transformers import MarianConfig, MarianMTModel

    sizes = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 32))
    }
    config = MarianConfig(
        vocab_size=64, d_model=16, max_position_embeddings=24, pad_token_id=0, decoder_start_token_id=0, **sizes
    )
    model = MarianMTModel(config)
    fill(model, 0)
    model.save_pretrained(tmp_path / "merged")
    made = "model.encoder.embed_positions.weight"
    assert made not in load_file(tmp_path / "merged" / "model.safetensors")
    reshard(tmp_path / "merged", tmp_path / "split", tp=2, pp=1)
    write_split(model, plan_of(type(model), model.config, 2, 1), tmp_path / "right")
    assert torch.equal(open_source(tmp_path / "split").read(made), model.state_dict()[made])
    assert weights(tmp_path / "split") == weights(tmp_path / "right")


def test_everything_else_in_the_folder_is_copied_but_no_foreign_weights(tmp_path: Path) -> None:
    whole_model("gpt2").save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "README.md", "modeling_own.py", "tf_model.h5", "training_args.bin", ".gitattributes"):
        (tmp_path / "merged" / name).write_text(name)
    reshard(tmp_path / "merged", tmp_path / "split", tp=1, pp=2)
    assert sorted(path.name for path in (tmp_path / "split").iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "layout.json",
        "model_tp=0_pp=0.safetensors",
        "model_tp=0_pp=1.safetensors",
        "modeling_own.py",
        "tokenizer.json",
    ]
    assert not staging_folder(tmp_path / "split").exists()


@pytest.mark.parametrize("serialization", ["safetensors", "torch"])
def test_what_would_be_written_is_known_before(tmp_path: Path, serialization: Any) -> None:
    whole_model("llama").save_pretrained(tmp_path / "merged")
    told: list[tuple[int, int]] = []
    options: Any = {"tp": 3, "pp": 2, "serialization": serialization}
    planned = reshard(tmp_path / "merged", tmp_path / "split", dry_run=True, **options)
    assert not (tmp_path / "split").exists()
    assert reshard(tmp_path / "merged", tmp_path / "split", progress=lambda *bytes: told.append(bytes), **options) == planned
    written = {path.name: path.stat().st_size for path in (tmp_path / "split").iterdir()}
    assert planned.keys() == written.keys() - {"layout.json"}
    if serialization == "safetensors":
        assert all(written[name] == size for name, size in planned.items())
    assert told == sorted(told)
    assert told[0][0] < told[-1][0] == told[-1][1]


def test_a_policy_that_changed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole_model("gpt2").save_pretrained(tmp_path / "merged")
    policy = find_policy(None, "gpt2")
    changed = policy.model_copy(update={"replicate": {"nothing": "to be another"}})
    reshard(tmp_path / "merged", tmp_path / "a", tp=2, pp=1)
    reshard(tmp_path / "a", tmp_path / "b", tp=1, pp=2, policy=policy)
    assert caplog.text == ""
    layouts = [json.loads((tmp_path / name / "layout.json").read_text()) for name in ("a", "b")]
    assert layouts[0]["policy_hash"] == layouts[1]["policy_hash"] == hash_of_policy(policy) != hash_of_policy(changed)
    source = open_source(tmp_path / "a")
    warn_of_another_policy(source, hash_of_policy(changed))
    assert f"{tmp_path / 'a'} was saved with policy gpt2" in caplog.text
    assert hash_of_policy(changed) in caplog.text
    caplog.clear()
    for harmless in (hash_of_policy(policy), ""):
        warn_of_another_policy(source, harmless)
    warn_of_another_policy(open_source(tmp_path / "merged"), hash_of_policy(policy))
    assert caplog.text == ""


# -- refused


@pytest.fixture
def split(tmp_path: Path) -> Path:
    write_split(whole_model("gpt2"), plan_of(*MODELS["gpt2"](), 2, 2), tmp_path / "split")
    return tmp_path / "split"


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    whole_model("gpt2").save_pretrained(tmp_path / "merged")
    return tmp_path / "merged"


def refused(folder: Path, name: str, kind: type[Exception] = CheckpointError, **options: Any) -> Any:
    """The error, which names the file or the folder; nothing is left behind."""
    out = folder.parent / "out"
    with pytest.raises(kind) as error:
        reshard(folder, out, **({"tp": 2, "pp": 1} | options))
    assert name in str(error.value)
    assert not out.exists()
    assert not staging_folder(out).exists()
    return error.value


def test_a_checkpoint_is_not_replaced_unasked_nor_by_itself(split: Path, merged: Path) -> None:
    before = weights(split)
    for target, complaint in ((split, "already"), (merged, "over itself")):
        with pytest.raises(CheckpointError, match=complaint):
            reshard(merged, target, tp=2, pp=1)
    with pytest.raises(CheckpointError, match="over itself"):
        reshard(split, split / ".." / "split", tp=2, pp=1, overwrite=True)
    with pytest.raises(CheckpointError, match="is a file"):
        reshard(merged, merged / "config.json", tp=2, pp=1, overwrite=True)
    assert weights(split) == before


def test_a_failed_replacement_leaves_the_old_checkpoint(split: Path, merged: Path) -> None:
    before = weights(split)
    path = merged / "model.safetensors"
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        reshard(merged, split, tp=2, pp=1, overwrite=True)
    assert weights(split) == before
    assert not staging_folder(split).exists()


def test_a_replacement_leaves_no_file_of_the_old_checkpoint(split: Path, merged: Path) -> None:
    (split / "notes.txt").write_text("mine")
    reshard(merged, split, tp=1, pp=1, overwrite=True)
    assert {path.name for path in split.iterdir()} >= {"notes.txt", "model_tp=0_pp=0.safetensors"}
    assert not (split / "model_tp=1_pp=0.safetensors").exists()


def one_byte_changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte changed": one_byte_changed,
    "too many": lambda path: shutil.copy(path, path.with_name("model_tp=2_pp=1.safetensors")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_split_checkpoint_is_refused(split: Path, damage: Callable[[Path], Any]) -> None:
    damage(split / "model_tp=1_pp=1.safetensors")
    refused(split, "model_tp=2_pp=1" if damage is DAMAGE["too many"] else "model_tp=1_pp=1")


def test_another_version_is_refused(split: Path) -> None:
    data = json.loads((split / "layout.json").read_text())
    (split / "layout.json").write_text(json.dumps(data | {"version": 99}))
    assert refused(split, "layout.json").got == "99"


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    edit(tensors)
    save_file(tensors, path)


def test_a_missing_tensor_is_named(merged: Path) -> None:
    change(merged, lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"))
    error = refused(merged, f"{merged}: transformer.h.1.mlp.c_fc.weight")
    assert "lacks" in error.what


def test_an_unknown_tensor_is_named(merged: Path) -> None:
    change(merged, lambda tensors: tensors.update({"transformer.adapter": torch.ones(1)}))
    assert "does not have" in refused(merged, f"{merged}: transformer.adapter").what


def test_another_shape_is_named(merged: Path) -> None:
    change(merged, lambda tensors: tensors.update({"transformer.ln_f.weight": torch.ones(7)}))
    error = refused(merged, f"{merged}: transformer.ln_f.weight")
    assert (error.expected, error.got) == ((24,), (7,))


def test_tied_names_with_two_values_are_refused(merged: Path) -> None:
    change(merged, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 1}))
    refused(merged, "lm_head.weight")


@pytest.mark.parametrize("form", ["split", "merged"])
def test_the_config_of_another_model_is_refused(request: pytest.FixtureRequest, form: str) -> None:
    folder = request.getfixturevalue(form)
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder)
    refused(folder, "config.json" if form == "split" else str(folder))


def test_the_config_of_another_size_is_refused(split: Path) -> None:
    GPT2Config(architectures=["GPT2LMHeadModel"], n_embd=32, n_layer=4, n_head=4, vocab_size=131).save_pretrained(split)
    assert "shape" in refused(split, str(split)).what


def test_a_folder_without_a_usable_config_is_refused(merged: Path) -> None:
    path = merged / "config.json"
    good = json.loads(path.read_text())
    for bad in ("{", json.dumps(good | {"architectures": None}), json.dumps(good | {"architectures": ["os"]})):
        path.write_text(bad)
        refused(merged, "config.json")
    path.write_text(json.dumps(good | {"quantization_config": {"quant_method": "gptq"}}))
    refused(merged, str(merged), UnsupportedError)
    path.unlink()
    refused(merged, "config.json")


def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    whole_model("gpt2").save_pretrained(tmp_path / "here", max_shard_size="20KB")
    path = tmp_path / "here" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shutil.copy(next((tmp_path / "here").glob("*-of-*.safetensors")), tmp_path / "evil.safetensors")
    index["weight_map"]["transformer.wte.weight"] = "../evil.safetensors"
    path.write_text(json.dumps(index))
    assert "outside its folder" in refused(tmp_path / "here", str(path)).what


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (merged / "model.safetensors").unlink()
    (merged / "pytorch_model.bin").write_bytes(pickle.dumps({"transformer.wte.weight": Evil()}))
    refused(merged, "pytorch_model.bin")
    torch.save({"transformer.wte.weight": Evil()}, merged / "pytorch_model.bin")
    refused(merged, "pytorch_model.bin")
    assert not (tmp_path / "executed").exists()


def test_sizes_that_do_not_divide_and_models_without_a_policy_are_refused(tmp_path: Path, merged: Path) -> None:
    refused(merged, "fewer", PlanError, tp=5)
    refused(merged, "fewer blocks", PlanError, tp=1, pp=5)
    refused(merged, "no such policy", PolicyError, policy="none_of_these")
    refused(merged, "expert_split", PlanError, expert_split="odd")


def test_work_that_fails_does_not_wait_until_all_is_compared(
    tmp_path: Path, merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reshard(merged, tmp_path / "split", tp=2, pp=2)
    source = open_source(tmp_path / "split")
    checked: list[int] = []
    ended = threading.Event()

    def verify(part: int, parts: int) -> None:
        ended.wait()
        checked.append(part)

    def fail() -> None:
        with Verification(source) as verification:
            verification.so_far()  # nothing is known yet, which is no error
            end = verification._thread.shutdown

            def end_at_last() -> None:
                ended.set()
                end()

            monkeypatch.setattr(verification._thread, "shutdown", end_at_last)
            raise ZeroDivisionError

    monkeypatch.setattr(source, "verify", verify)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert checked == [0]
    with Verification(source) as verification:
        verification.end()
    assert checked == [0, 0, 1, 2, 3]


# -- memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_whole_tensor_is_in_memory(tmp_path: Path) -> None:
    """In a process of its own, after a small run: the peak grows by less than the largest tensor, which has 100 MB."""
    config = LlamaConfig(vocab_size=24576, hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8)
    small = whole_model("llama")
    small.save_pretrained(tmp_path / "small")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "large")
    specs = dict(_meta(config).state_dict())
    _write_zeros(tmp_path / "large" / "model.safetensors", specs)
    largest = max(tensor.nbytes for tensor in specs.values())
    assert largest > 100e6
    script = f"""
from oslo_engine.checkpoint.merge import merge
from oslo_engine.checkpoint.policy_hash import hash_of_policy, warn_of_another_policy
from oslo_engine.checkpoint.reshard import reshard
root = {str(tmp_path)!r}
def peak(): return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) * 1024
def steps(kind):
    yield reshard(f"{{root}}/{{kind}}", f"{{root}}/{{kind}}1", tp=3, pp=2)
    yield reshard(f"{{root}}/{{kind}}1", f"{{root}}/{{kind}}2", tp=1, pp=1)
    yield merge(f"{{root}}/{{kind}}2", f"{{root}}/{{kind}}3")
for _ in steps("small"): pass
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = peak()
for _ in steps("large"): print(peak() - before)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=110)
    grown = [int(line) for line in ran.stdout.split()]
    assert len(grown) == 3
    assert grown[0] > 0
    assert max(grown) < 0.9 * largest, f"{[f'{each / 1e6:.0f} MB' for each in grown]}, largest {largest / 1e6:.0f} MB"


def _meta(config: Any) -> PreTrainedModel:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _write_zeros(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from oslo_engine.checkpoint.safetensors_io import TensorSpec, write_safetensors

    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(path, specs, lambda name: torch.zeros(specs[name].shape, dtype=specs[name].dtype))
