"""A split checkpoint, put together, is what ``save_pretrained`` of the unsplit model writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, BertForMaskedLM, PreTrainedModel

import small_models
from oslo_engine.checkpoint import merge as module
from oslo_engine.checkpoint import stream
from oslo_engine.checkpoint.atomic import staging_folder
from oslo_engine.checkpoint.merge import merge
from oslo_engine.checkpoint.source import open_source
from oslo_engine.errors import CheckpointError
from split_models import LAYOUTS, MODELS, plan_of, whole_model, write_split


def contents(folder: Path) -> dict[str, tuple[Any, ...]]:
    """By name: type, shape and bytes of every tensor in the folder's safetensors files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                found[name] = (tensor.dtype, tensor.shape, bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
    return found


def same_as_saved(merged: Path, whole: PreTrainedModel, folder: Path, **options: Any) -> None:
    whole.save_pretrained(folder, **options)
    assert contents(merged) == contents(folder)
    assert contents(merged)
    assert sorted(path.name for path in merged.glob("*.safetensors*")) == sorted(p.name for p in folder.glob("*.safetensors*"))
    for path in folder.glob("*.safetensors*"):
        assert (merged / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_merging_gives_what_the_unsplit_model_saves(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    whole = whole_model(name, dtype=dtype)
    for tp, pp in LAYOUTS[name]:
        write_split(whole, plan_of(*MODELS[name](), tp, pp), tmp_path / f"{tp}{pp}")
        merge(tmp_path / f"{tp}{pp}", tmp_path / f"merged {tp}{pp}")
        same_as_saved(tmp_path / f"merged {tp}{pp}", whole, tmp_path / "right")
        loaded = type(whole).from_pretrained(tmp_path / f"merged {tp}{pp}")
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), whole.parameters(), strict=True))
        assert loaded.dtype == dtype


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_large_checkpoint_is_written_in_shards_with_an_index(tmp_path: Path, name: str) -> None:
    whole = whole_model(name)
    write_split(whole, plan_of(*MODELS[name](), 2, 2), tmp_path / "split")
    merge(tmp_path / "split", tmp_path / "merged", max_shard_size="20KB")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 3
    same_as_saved(tmp_path / "merged", whole, tmp_path / "right", max_shard_size="20KB")
    assert type(whole).from_pretrained(tmp_path / "merged").num_parameters() == whole.num_parameters()


def test_bin_files_can_be_merged_too(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    write_split(whole, plan_of(*MODELS["gpt2"](), 2, 2), tmp_path / "split", "torch")
    merge(tmp_path / "split", tmp_path / "merged")
    same_as_saved(tmp_path / "merged", whole, tmp_path / "right")


class WithBuffer(BertForMaskedLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("seen", torch.arange(5))


def test_the_index_counts_parameters_and_not_buffers(tmp_path: Path) -> None:
    config = MODELS["bert"]()[1]
    whole = WithBuffer(config)
    write_split(whole, plan_of(WithBuffer, config, 1, 1), tmp_path / "split")
    merge(tmp_path / "split", tmp_path / "merged", max_shard_size="20KB")
    whole.save_pretrained(tmp_path / "right", max_shard_size="20KB")
    assert contents(tmp_path / "merged") == contents(tmp_path / "right")
    found, right = (json.loads((tmp_path / form / "model.safetensors.index.json").read_text()) for form in ("merged", "right"))
    assert found["metadata"] == right["metadata"]


@pytest.mark.parametrize("size", ["50GB", "10KB"])
def test_experts_are_written_in_the_form_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    makers = []
    real = module._Maker
    monkeypatch.setattr(module, "_Maker", lambda *args: makers.append(real(*args)) or makers[-1])
    cls, config, _ = small_models.mixtral()
    torch.manual_seed(0)
    whole = cls(config)
    layout = write_split(whole, plan_of(cls, config, 1, 1), tmp_path / "split")
    assert {tensor.converted for tensor in layout.tensors} == {True, False}
    merge(tmp_path / "split", tmp_path / "merged", max_shard_size=size)
    assert [maker.waiting for maker in makers] == [{}]
    whole.save_pretrained(tmp_path / "right", max_shard_size=size)
    assert contents(tmp_path / "merged") == contents(tmp_path / "right")
    assert any("block_sparse_moe.experts.3.w1" in name for name in contents(tmp_path / "merged"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), whole.parameters(), strict=True))


def test_converting_without_the_config_is_an_error(tmp_path: Path) -> None:
    cls, config, _ = small_models.mixtral()
    write_split(cls(config), plan_of(cls, config, 1, 1), tmp_path / "split", with_config=False)
    with pytest.raises(CheckpointError, match="config"):
        merge(tmp_path / "split", tmp_path / "merged")


def test_names_that_loading_changed_are_changed_back(tmp_path: Path) -> None:
    whole = whole_model("bert")
    state = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in whole.state_dict().items()}
    whole.config.save_pretrained(tmp_path / "old")
    torch.save(state, tmp_path / "old" / "pytorch_model.bin")
    loaded = BertForMaskedLM.from_pretrained(tmp_path / "old")
    write_split(loaded, plan_of(*MODELS["bert"](), 2, 2), tmp_path / "split")
    merge(tmp_path / "split", tmp_path / "merged")
    same_as_saved(tmp_path / "merged", loaded, tmp_path / "right")
    assert any("gamma" in name for name in contents(tmp_path / "merged"))


def test_tensors_that_the_class_does_not_save_are_left_out(tmp_path: Path) -> None:
    whole = whole_model("bert")
    whole._keys_to_ignore_on_save = {"bert.embeddings.position_embeddings.weight"}
    write_split(whole, plan_of(*MODELS["bert"](), 2, 2), tmp_path / "split")
    merge(tmp_path / "split", tmp_path / "merged")
    same_as_saved(tmp_path / "merged", whole, tmp_path / "right")
    assert "bert.embeddings.position_embeddings.weight" in open_source(tmp_path / "split").names()


def test_ties_that_the_class_does_not_declare_are_an_error(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    whole._tied_weights_keys = None
    with pytest.raises(CheckpointError, match="not declare") as error:
        write_split(whole, plan_of(*MODELS["gpt2"](), 1, 1), tmp_path)
    assert error.value.where == "lm_head.weight, transformer.wte.weight"


def test_everything_else_in_the_folder_is_copied_and_a_former_checkpoint_replaced(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    write_split(whole, plan_of(*MODELS["gpt2"](), 2, 1), tmp_path / "split")
    (tmp_path / "split" / "tokenizer.json").write_text("t")
    shutil.copytree(tmp_path / "split", tmp_path / "merged")  # the same folder name was used for a split save before
    merge(tmp_path / "split", tmp_path / "merged", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert not staging_folder(tmp_path / "merged").exists()


def test_a_checkpoint_is_not_merged_over_itself(tmp_path: Path) -> None:
    write_split(whole_model("gpt2"), plan_of(*MODELS["gpt2"](), 2, 1), tmp_path / "here")
    (tmp_path / "link").symlink_to(tmp_path / "here")
    for target in ("here", "link"):
        with pytest.raises(CheckpointError, match="over itself"):
            merge(tmp_path / "here", tmp_path / target, overwrite=True)


def test_a_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    write_split(whole_model("gpt2"), plan_of(*MODELS["gpt2"](), 2, 1), tmp_path / "split")
    whole_model("gpt2", seed=1).save_pretrained(tmp_path / "merged")
    before = contents(tmp_path / "merged")
    with pytest.raises(CheckpointError, match="already") as error:
        merge(tmp_path / "split", tmp_path / "merged")
    assert error.value.where == str(tmp_path / "merged")
    assert contents(tmp_path / "merged") == before


@pytest.mark.parametrize("size", ["50GB", "20KB"])
def test_what_would_be_written_is_known_before(tmp_path: Path, size: str) -> None:
    write_split(whole_model("gpt2"), plan_of(*MODELS["gpt2"](), 2, 2), tmp_path / "split")
    told: list[tuple[int, int]] = []
    planned = merge(tmp_path / "split", tmp_path / "merged", max_shard_size=size, dry_run=True)
    assert not (tmp_path / "merged").exists()
    merge(tmp_path / "split", tmp_path / "merged", max_shard_size=size, progress=lambda *bytes: told.append(bytes))
    written = {path.name: path.stat().st_size for path in (tmp_path / "merged").iterdir()}
    assert planned == {name: num for name, num in written.items() if not name.endswith(".index.json")}
    assert told == sorted(told)
    assert (
        told[-1][0]
        == told[-1][1]
        == sum(spec.num_bytes for spec in map(open_source(tmp_path / "merged").spec, contents(tmp_path / "merged")))
    )


def test_an_altered_file_is_not_merged_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    whole = whole_model("gpt2")
    whole.save_pretrained(tmp_path / "merged")
    before = contents(tmp_path / "merged")
    write_split(whole_model("gpt2", seed=1), plan_of(*MODELS["gpt2"](), 2, 1), tmp_path / "split")
    path = tmp_path / "split" / "model_tp=1_pp=0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="altered"):
        merge(tmp_path / "split", tmp_path / "merged", overwrite=True)
    assert contents(tmp_path / "merged") == before


def test_only_a_split_checkpoint_can_be_merged(tmp_path: Path) -> None:
    whole_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="not split"):
        merge(tmp_path, tmp_path / "merged")


def test_a_few_bytes_are_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = whole_model("llama")
    write_split(whole, plan_of(*MODELS["llama"](), 2, 2), tmp_path / "split")
    monkeypatch.setattr(stream, "BUFFER_BYTES", 1000)
    sizes: list[int] = []
    real = module.SplitSource.read_into

    def read_into(self: Any, name: str, out: torch.Tensor, *args: Any) -> None:
        sizes.append(out.nbytes)
        real(self, name, out, *args)

    monkeypatch.setattr(module.SplitSource, "read_into", read_into)
    merge(tmp_path / "split", tmp_path / "merged")
    same_as_saved(tmp_path / "merged", whole, tmp_path / "right")
    assert len(sizes) > 100
    assert max(sizes) <= 1000


def test_a_size_of_files_that_is_none_is_refused(tmp_path: Path) -> None:
    cls, config, _ = small_models.mixtral()
    write_split(cls(config), plan_of(cls, config, 1, 1), tmp_path / "split")
    with pytest.raises(CheckpointError, match="no such size of files"):
        merge(tmp_path / "split", tmp_path / "merged", max_shard_size="0")
    assert not (tmp_path / "merged").exists()
