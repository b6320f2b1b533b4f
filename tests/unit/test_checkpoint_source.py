"""Opening checkpoints of every form, and refusing what is missing, left over, damaged or foreign."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oslo_engine.checkpoint.layout import Layout, TensorLayout
from oslo_engine.checkpoint.safetensors_io import SafetensorsFile, write_safetensors
from oslo_engine.checkpoint.source import floating_dtype, open_source, verify_source
from oslo_engine.errors import CheckpointError
from oslo_engine.shards import Shard
from split_models import MODELS, plan_of, whole_model, write_split


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(6, 5), "b": torch.randn(4), "c": torch.arange(12).reshape(2, 6), "d": torch.randn(3, 2).half()}


def index(folder: Path, weight_map: dict[str, str], kind: str) -> None:
    name = "model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json"
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def single_safetensors(folder: Path) -> None:
    save_file(tensors(), folder / "model.safetensors")


def sharded_safetensors(folder: Path) -> None:
    named = tensors()
    for number, names in enumerate(("ab", "cd")):
        save_file({name: named[name] for name in names}, folder / f"model-0000{number + 1}-of-00002.safetensors")
    index(folder, {name: f"model-0000{1 + (name in 'cd')}-of-00002.safetensors" for name in named}, "safetensors")


def single_bin(folder: Path) -> None:
    torch.save(tensors(), folder / "pytorch_model.bin")


def sharded_bin(folder: Path) -> None:
    named = tensors()
    for number, names in enumerate(("ab", "cd")):
        torch.save({name: named[name] for name in names}, folder / f"pytorch_model-0000{number + 1}-of-00002.bin")
    index(folder, {name: f"pytorch_model-0000{1 + (name in 'cd')}-of-00002.bin" for name in named}, "bin")


def old_bin(folder: Path) -> None:
    """The format before zip files, which cannot be mapped."""
    torch.save(tensors(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


FORMS = {form.__name__: form for form in (single_safetensors, sharded_safetensors, single_bin, sharded_bin, old_bin)}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_tensors_and_slices(tmp_path: Path, form: Callable[[Path], None]) -> None:
    form(tmp_path)
    source, right = open_source(tmp_path), tensors()
    verify_source(source)
    assert sorted(source.names()) == sorted(right)
    assert floating_dtype(source) == torch.float32
    for name, tensor in right.items():
        assert (source.shape(name), source.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(source.read(name), tensor)
        for dim in range(tensor.ndim):
            read = source.read(name, dim, [(1, 2), (0, 1)])
            assert torch.equal(read, torch.cat([tensor.narrow(dim, 1, 1), tensor.narrow(dim, 0, 1)], dim))
            assert read.untyped_storage().nbytes() == read.numel() * read.element_size()


def test_a_list_of_files_is_a_checkpoint_too(tmp_path: Path) -> None:
    sharded_safetensors(tmp_path)
    source = open_source(sorted(tmp_path.glob("*.safetensors")))
    assert sorted(source.names()) == sorted(tensors())
    assert sorted(open_source(tmp_path / "model-00001-of-00002.safetensors").names()) == ["a", "b"]


# -- split


@pytest.mark.parametrize("serialization", ["safetensors", "torch"])
@pytest.mark.parametrize(("name", "tp", "pp"), [("gpt2", 2, 2), ("llama_two_kv", 4, 1), ("llama", 2, 2), ("t5", 3, 1)])
def test_a_split_checkpoint_reads_as_the_whole_tensors(tmp_path: Path, name: str, tp: int, pp: int, serialization: Any) -> None:
    whole = whole_model(name)
    write_split(whole, plan_of(*MODELS[name](), tp, pp), tmp_path, serialization)
    source = open_source(tmp_path)
    verify_source(source)
    for key, right in whole.named_parameters(remove_duplicate=False):
        right = right.detach()
        assert torch.equal(source.read(key), right), key
        for dim, size in enumerate(right.shape):
            for spans in ([(0, size)], [(size // 3, size)], [(size // 2, size), (0, size // 3)], [(0, 0)]):
                pieces = [right.narrow(dim, start, stop - start) for start, stop in spans]
                assert torch.equal(source.read(key, dim, spans), torch.cat(pieces, dim)), (key, dim, spans)


def test_entries_that_two_ranks_hold_are_read_from_the_first(tmp_path: Path) -> None:
    """A fused weight of which one part is cut and the other replicated, in ranks' files that came to differ."""
    shard = Shard(0, 6, (((0, 2), (2, 4)), ((0, 2), (4, 6))))
    tensor = TensorLayout("x", ("x",), (6, 3), torch.float32, shard, (0,), merged_name="x")
    right = torch.randn(6, 3)
    layout = Layout(2, 1, "none", "Model", "safetensors", (tensor,))
    files = {}
    for rank in range(2):
        local = shard.apply(right, rank)
        local[:2] += rank
        spec = {"x": tensor.local_spec(rank)}
        files[layout.file_name(rank, 0)] = write_safetensors(
            tmp_path / layout.file_name(rank, 0), spec, {"x": local}.__getitem__
        )
    replace(layout, files=files).write(tmp_path / "layout.json")
    source = open_source(tmp_path)
    assert torch.equal(source.read("x"), right)
    assert torch.equal(source.read("x", 0, [(3, 6), (0, 1)]), torch.cat([right[3:], right[:1]]))
    assert torch.equal(source.read("x", 1, [(2, 3), (0, 1)]), right[:, [2, 0]])


@pytest.fixture
def split(tmp_path: Path) -> Path:
    write_split(whole_model("gpt2"), plan_of(*MODELS["gpt2"](), 2, 2), tmp_path / "split")
    return tmp_path / "split"


def refused(folder: Path, name: str, *, read: bool = False, verify: bool = False) -> CheckpointError:
    """The error of opening (reading, checking) a checkpoint, which names the file."""

    def use() -> None:
        source = open_source(folder)
        for key in source.names() if read else ():
            source.read(key)
        if verify:
            verify_source(source)

    with pytest.raises(CheckpointError) as error:
        use()
    assert name in (error.value.where or "")
    return error.value


def test_a_missing_file_is_named(split: Path) -> None:
    (split / "model_tp=1_pp=0.safetensors").unlink()
    assert "missing" in refused(split, "model_tp=1_pp=0.safetensors").what


def test_a_file_too_many_is_named(split: Path) -> None:
    shutil.copy(split / "model_tp=1_pp=0.safetensors", split / "model_tp=2_pp=0.safetensors")
    assert "does not belong" in refused(split, "model_tp=2_pp=0.safetensors").what


def test_a_truncated_file_is_named(split: Path) -> None:
    path = split / "model_tp=0_pp=1.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert "wrong size" in refused(split, path.name).what


def test_an_altered_file_of_the_same_size_is_named(split: Path) -> None:
    path = split / "model_tp=0_pp=1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    error = refused(split, path.name, verify=True)
    assert "altered" in error.what
    assert "xxh3_128" in str(error.expected)


def test_ranks_check_a_part_of_the_files_each(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oslo_engine.checkpoint import split as module

    checked: list[str] = []
    monkeypatch.setattr(module, "check_unaltered", lambda path, *args, **kwargs: checked.append(path.name))
    source = open_source(split)
    for part in range(3):
        source.verify(part, 3)
    assert sorted(checked) == sorted(path.name for path in split.glob("*.safetensors"))


def test_a_file_of_another_layout_is_named(split: Path, tmp_path: Path) -> None:
    """The right size by chance, but other tensors."""
    path = split / "model_tp=0_pp=1.safetensors"
    size = path.stat().st_size
    save_file({"x": torch.zeros(1)}, path)
    file = SafetensorsFile(path)
    assert list(file.specs) == ["x"]
    padding = size - path.stat().st_size
    save_file({"x": torch.zeros(1), "y": torch.zeros(padding, dtype=torch.uint8)}, path)
    save_file({"x": torch.zeros(1), "y": torch.zeros(padding - (path.stat().st_size - size), dtype=torch.uint8)}, path)
    assert path.stat().st_size == size
    assert "as the layout says" in refused(split, path.name, read=True).what


def test_split_files_without_a_layout_are_not_loaded(split: Path) -> None:
    (split / "layout.json").unlink()
    assert "layout.json" in str(refused(split, "split"))


def test_two_checkpoints_in_one_folder_are_not_guessed_between(split: Path) -> None:
    single_safetensors(split)
    assert "two checkpoints" in refused(split, "split").what


# -- merged


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    sharded_safetensors(tmp_path)
    (tmp_path / "inside").mkdir()
    for name in ("../model-00001-of-00002.safetensors", str(tmp_path / "model-00001-of-00002.safetensors"), "..", "a/b", 3):
        shutil.copy(tmp_path / "model-00002-of-00002.safetensors", tmp_path / "inside")
        index(tmp_path / "inside", {"a": name}, "safetensors")
        error = refused(tmp_path / "inside", "model.safetensors.index.json")
        assert "damaged" in error.what or "outside" in error.what


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": {}}}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    sharded_safetensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refused(tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize("form", [sharded_safetensors, sharded_bin])
def test_a_missing_shard_is_named(tmp_path: Path, form: Callable[[Path], None]) -> None:
    form(tmp_path)
    (path := next(tmp_path.glob("*-00002-of-*"))).unlink()
    assert "missing" in refused(tmp_path, path.name).what


@pytest.mark.parametrize("form", [sharded_safetensors, sharded_bin])
def test_a_shard_that_lacks_a_tensor_of_the_index_is_named(tmp_path: Path, form: Callable[[Path], None]) -> None:
    form(tmp_path)
    path = next(tmp_path.glob("*-00002-of-*"))
    if path.suffix == ".bin":
        torch.save({"c": torch.ones(1)}, path)
    else:
        save_file({"c": torch.ones(1)}, path)
    assert "lacks 'd'" in refused(tmp_path, path.name).what


def test_a_name_in_two_shards_is_an_error(tmp_path: Path) -> None:
    sharded_safetensors(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    save_file(load_file(path) | {"a": torch.ones(1)}, path)
    assert "two files" in refused(tmp_path, path.name).what


def test_a_truncated_bin_is_named(tmp_path: Path) -> None:
    for form in (single_bin, old_bin):
        form(tmp_path)
        path = tmp_path / "pytorch_model.bin"
        os.truncate(path, path.stat().st_size // 2)
        refused(tmp_path, path.name, read=True)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bin_executes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for write in (lambda path: torch.save({"a": Evil()}, path), lambda path: path.write_bytes(pickle.dumps({"a": Evil()}))):
        write(tmp_path / "pytorch_model.bin")
        refused(tmp_path, "pytorch_model.bin", read=True)
        assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [[1, 2], {"a": 3}, {"a": {"b": torch.ones(1)}}, {1: torch.ones(1)}], ids=str)
def test_a_bin_with_something_else_is_named(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert "something else" in refused(tmp_path, "pytorch_model.bin", read=True).what


def test_an_empty_folder_says_what_was_looked_for(tmp_path: Path) -> None:
    error = refused(tmp_path, tmp_path.name)
    assert "model.safetensors" in str(error.expected)
    assert "no such checkpoint" in refused(tmp_path / "none", "none").what


def test_shards_without_an_index_are_not_loaded(tmp_path: Path) -> None:
    sharded_safetensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "without its index" in str(refused(tmp_path, tmp_path.name).got)


def test_unknown_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.h5").write_bytes(b"")
    refused(tmp_path / "weights.h5", "weights.h5")
