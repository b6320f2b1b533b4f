"""Folders of torch.distributed.checkpoint, read without it: tensors and slices, but nothing that is damaged or runs code."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from oslo_engine.checkpoint import ranges
from oslo_engine.checkpoint.merge import merge
from oslo_engine.checkpoint.reshard import reshard
from oslo_engine.checkpoint.source import open_source
from oslo_engine.errors import CheckpointError
from split_models import MODELS, plan_of, whole_model, write_split

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(6, 5),
        "deep": torch.randn(4, 3, 5).to(torch.bfloat16),
        "vector": torch.arange(7),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "transposed": torch.randn(3, 4).t(),
        "empty": torch.zeros(0, 3),
    }


def same(folder: Path, right: dict[str, torch.Tensor]) -> None:
    source = open_source(folder)
    assert sorted(source.names()) == sorted(right)
    for name, tensor in right.items():
        assert (source.shape(name), source.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(source.read(name), tensor), name
        for dim, size in enumerate(tensor.shape):
            for spans in ([(0, size)], [(size // 2, size), (0, size // 3)], [(size // 3, size - size // 4)], []):
                pieces = [tensor.narrow(dim, start, stop - start) for start, stop in spans] or [tensor.narrow(dim, 0, 0)]
                assert torch.equal(source.read(name, dim, spans), torch.cat(pieces, dim)), (name, dim, spans)


def save(state: Any, folder: Path) -> Path:
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def in_chunks(named: dict[str, torch.Tensor], folder: Path, cuts: dict[str, list[list[int]]], *, num_files: int = 3) -> Path:
    """What several ranks would write: each tensor cut at these places along each dimension, its chunks dealt to files."""
    folder.mkdir()
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    blobs: list[list[bytes]] = [[] for _ in range(num_files)]
    count = 0
    for name, tensor in named.items():
        boxes: list[tuple[list[int], torch.Tensor]] = [([0] * tensor.ndim, tensor)]
        for dim, places in enumerate(cuts.get(name, [])):
            bounds = [*places, tensor.shape[dim]]
            boxes = [
                ([*at[:dim], start, *at[dim + 1 :]], box.narrow(dim, start, stop - start))
                for at, box in boxes
                for start, stop in zip([0, *places], bounds, strict=True)
            ]
        chunks = [ChunkStorageMetadata(torch.Size(at), box.shape) for at, box in boxes]
        entries[name] = TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.shape, chunks)
        for at, box in boxes:
            buffer = io.BytesIO()
            torch.save(box.clone(), buffer)
            file = count % num_files
            count += 1
            info = _StorageInfo(f"__{file}_0.distcp", sum(map(len, blobs[file])), buffer.getbuffer().nbytes)
            storage[MetadataIndex(name, at)] = info
            blobs[file].append(buffer.getvalue())
    for file, parts in enumerate(blobs):
        (folder / f"__{file}_0.distcp").write_bytes(b"".join(parts))
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=storage)))
    return folder


CUTS = {"a": [[2, 4], [3]], "deep": [[1], [], [2]], "vector": [[3, 5]]}


def test_what_one_process_saved_is_read(tmp_path: Path) -> None:
    same(save(tensors(), tmp_path / "a"), tensors())


@pytest.mark.parametrize("run_bytes", [0, 1 << 30], ids=["run by run", "whole rows"])
def test_chunks_of_several_ranks_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_bytes: int) -> None:
    monkeypatch.setattr(ranges, "DIRECT_RUN_BYTES", run_bytes)
    named = {name: tensor for name, tensor in tensors().items() if name != "empty"}
    same(in_chunks(named, tmp_path / "a", CUTS), named)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    assert all(torch.equal(loaded[name], named[name]) for name in named), "torch reads it too"


def test_safetensors_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    named = {name: tensor.contiguous() for name, tensor in tensors().items() if name not in ("empty", "scalar")}
    rows = {"a": 2, "deep": 1, "vector": 3, "transposed": 2}
    for rank, part in enumerate(("first", "second"), 1):
        cut = {n: (t[: rows[n]] if part == "first" else t[rows[n] :]).contiguous() for n, t in named.items()}
        at = {n: {"saved_offsets": [0 if part == "first" else rows[n], *[0] * (t.ndim - 1)]} for n, t in named.items()}
        import json

        path = tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        save_file(cut, path, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(at)})
    same(tmp_path, named)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing") as error:
        open_source(tmp_path)
    assert error.value.where == str(tmp_path / "shard-00001-model-00001-of-00001.safetensors")


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    """The form of ``save_pretrained(..., distributed_checkpoint=True)``, which one process cannot ask for."""
    named = {name: tensor.contiguous() for name, tensor in tensors().items() if name != "empty"}
    writer = HuggingFaceStorageWriter(str(tmp_path / "a"), save_distributed=True)
    dcp.save(named, storage_writer=writer, no_dist=True)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["shard-00001-model-00001-of-00001.safetensors"]
    same(tmp_path / "a", named)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state},
        lambda state: {"app": {"model": state, "optim": {"state": {"a": {"step": torch.ones(1)}}}}},
        lambda state: {"weights": state},
        lambda state: {"model": state, "step": torch.tensor(3), "config": {"lr": 0.1}},
    ],
    ids=["a state dict", "accelerate", "an application", "one key", "beside scalars"],
)
def test_the_model_is_found_in_what_was_saved(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    same(save(wrap(tensors()), tmp_path / "a"), tensors())


def test_what_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    save({"one": tensors(), "two": tensors()}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="not clear") as error:
        open_source(tmp_path / "a")
    assert error.value.where == str(tmp_path / "a" / ".metadata")


def test_only_the_bytes_of_a_slice_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save({"x": torch.randn(1000, 64)}, tmp_path / "a")
    source = open_source(folder)
    source.read("x", 0, [(0, 1)])
    num_bytes = 0
    real = os.preadv

    def count(fd: int, buffers: Any, offset: int) -> int:
        nonlocal num_bytes
        num_bytes += sum(len(buffer) for buffer in buffers)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", count)
    source.read("x", 0, [(10, 20)])
    assert num_bytes == 10 * 64 * 4


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_model_is_resharded_and_merged_from_it(tmp_path: Path, name: str) -> None:
    model = whole_model(name)
    model.save_pretrained(tmp_path / "right")
    model.config.save_pretrained(tmp_path / "checkpoint")
    folder = save({"model": model.state_dict()}, tmp_path / "checkpoint" / "pytorch_model_fsdp_0")
    reshard(folder, tmp_path / "split", tp=2, pp=2)
    write_split(model, plan_of(*MODELS[name](), 2, 2), tmp_path / "split right")
    for path in (tmp_path / "split right").glob("*tp=*"):
        assert (tmp_path / "split" / path.name).read_bytes() == path.read_bytes()
    model.config.save_pretrained(tmp_path / "split")
    merge(tmp_path / "split", tmp_path / "merged")
    path = "model.safetensors"
    assert (tmp_path / "merged" / path).read_bytes() == (tmp_path / "right" / path).read_bytes()


# -- refused


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def refused(folder: Path, name: str) -> CheckpointError:
    def use() -> None:
        source = open_source(folder)
        for key in source.names():
            source.read(key)

    with pytest.raises(CheckpointError) as error:
        use()
    assert name in (error.value.where or "")
    return error.value


@pytest.mark.parametrize(
    "content",
    [
        Evil(),
        Metadata({"a": Evil()}, storage_data={}),  # type: ignore[dict-item]
        Metadata({}, planner_data=os.getcwd),
        Metadata({}, planner_data=torch.load),
        Metadata({}, planner_data=torch.Tensor),
    ],
    ids=["code", "code inside", "a function", "a function of torch", "another class"],
)
def test_metadata_that_names_anything_else_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save(tensors(), tmp_path / "a")
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    assert "asks for" in str(refused(folder, ".metadata").got)
    assert not (tmp_path / "executed").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_chunk_with_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = in_chunks({"a": torch.ones(2)}, tmp_path / "a", {}, num_files=1)
    path = folder / "__0_0.distcp"
    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    path.write_bytes(buffer.getvalue().ljust(path.stat().st_size, b"\0"))
    refused(folder, path.name)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x80\x04N."], ids=["empty", "nonsense", "nothing"])
def test_damaged_metadata_is_named(tmp_path: Path, data: bytes) -> None:
    folder = save(tensors(), tmp_path / "a")
    (folder / ".metadata").write_bytes(data)
    refused(folder, ".metadata")


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = save(tensors(), tmp_path / "a")
    file = next(folder.glob("*.distcp"))
    file.rename(tmp_path / "kept")
    assert "missing" in refused(folder, file.name).what
    (tmp_path / "kept").rename(file)
    (folder / ".metadata").unlink()
    refused(folder, ".metadata")


def test_truncated_files_are_named(tmp_path: Path) -> None:
    folder = save(tensors(), tmp_path / "a")
    file = next(folder.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)
    assert "truncated" in refused(folder, file.name).what


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/passwd", "..", "a/b", 3], ids=str)
def test_files_elsewhere_are_refused(tmp_path: Path, name: Any) -> None:
    folder = in_chunks({"a": torch.ones(2)}, tmp_path / "a", {})
    (tmp_path / "x.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "outside" in refused(folder, ".metadata").what


def test_chunks_that_do_not_fill_their_tensor_are_refused(tmp_path: Path) -> None:
    folder = in_chunks({"a": torch.randn(6, 4)}, tmp_path / "a", {"a": [[2, 4], [1]]})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    whole = dict(metadata.storage_data)
    for index in whole:
        metadata.storage_data = {key: value for key, value in whole.items() if key != index}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        assert "all parts of 'a'" in refused(folder, "a").what


def test_another_checkpoint_beside_it_is_not_guessed_between(tmp_path: Path) -> None:
    folder = save(tensors(), tmp_path / "a")
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    assert "two checkpoints" in refused(folder, "a").what


def test_a_split_checkpoint_can_replace_it(tmp_path: Path) -> None:
    model = whole_model("gpt2")
    model.save_pretrained(tmp_path / "merged")
    save(model.state_dict(), tmp_path / "a")
    with pytest.raises(CheckpointError, match="already"):
        reshard(tmp_path / "merged", tmp_path / "a", tp=2)
    reshard(tmp_path / "merged", tmp_path / "a", tp=2, overwrite=True)
    right = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(open_source(tmp_path / "a").read("transformer.wte.weight"), right["transformer.wte.weight"])
