"""Reading and writing safetensors files by byte ranges."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oslo_engine.checkpoint import ranges, safetensors_io, writeback
from oslo_engine.checkpoint.checksums import record_of
from oslo_engine.checkpoint.safetensors_io import DTYPES, SafetensorsFile, TensorSpec, write_safetensors
from oslo_engine.errors import CheckpointError


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "flags": torch.tensor([True, False, True]),
        "matrix": torch.randn(7, 5),
        "half": torch.randn(3, 4, 5).to(torch.bfloat16),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "ids": torch.arange(6, dtype=torch.int64).reshape(2, 3),
        "transposed": torch.randn(4, 6).t(),
    }


def test_what_is_written_is_what_the_library_reads(tmp_path: Path) -> None:
    tensors = some_tensors()
    record = write_safetensors(tmp_path / "a.safetensors", specs_of(tensors), tensors.__getitem__)
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) and loaded[name].dtype == tensors[name].dtype for name in tensors)
    assert record == record_of(tmp_path / "a.safetensors")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_type_survives(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(8 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = tensor.view(dtype).reshape(2, 4)
    write_safetensors(tmp_path / "a.safetensors", {"x": TensorSpec(dtype, (2, 4))}, lambda name: tensor)
    read = SafetensorsFile(tmp_path / "a.safetensors").read("x")
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8))


def test_one_tensor_is_asked_for_at_a_time(tmp_path: Path) -> None:
    tensors = some_tensors()
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return tensors.pop(name)

    write_safetensors(tmp_path / "a.safetensors", specs_of(tensors), read)
    assert sorted(asked) == sorted(some_tensors())


@pytest.mark.parametrize("run_bytes", [0, 1 << 30], ids=["run by run", "whole rows"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_spans_are_what_indexing_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int, run_bytes: int) -> None:
    monkeypatch.setattr(ranges, "DIRECT_RUN_BYTES", run_bytes)
    monkeypatch.setattr(ranges, "CHUNK_BYTES", 100)
    x = torch.randn(5, 7, 6)
    save_file({"before": torch.ones(3), "x": x}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for spans in ([(1, 3)], [(0, 2), (4, 5)], [(3, 5), (0, 1)], [(2, 2)], []):
        right = torch.cat([x.narrow(dim, a, b - a) for a, b in spans] or [x.narrow(dim, 0, 0)], dim)
        read = file.read("x", dim, spans)
        assert torch.equal(read, right)
        assert read.is_contiguous()


def test_rows_are_read_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"x": torch.randn(1000, 8)}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    num_bytes = 0
    real = os.preadv

    def count(fd: int, buffers: Any, offset: int) -> int:
        nonlocal num_bytes
        num_bytes += sum(len(buffer) for buffer in buffers)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", count)
    file.read("x", 0, [(10, 20), (500, 510)])
    assert num_bytes == 20 * 8 * 4


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(100)}, path)
    x = SafetensorsFile(path).read("x")
    with open(path, "r+b") as file:
        file.seek(-400, os.SEEK_END)
        file.write(bytes(400))
    assert torch.equal(x, torch.ones(100))


def test_reads_larger_than_one_call_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "IO_BYTES", 7)
    monkeypatch.setattr(safetensors_io, "IO_BYTES", 7)
    x = torch.randn(11, 3)
    write_safetensors(tmp_path / "a.safetensors", {"x": TensorSpec(x.dtype, (11, 3))}, lambda name: x)
    assert torch.equal(SafetensorsFile(tmp_path / "a.safetensors").read("x"), x)


@pytest.mark.skipif(sys.platform != "linux", reason="fallocate")
def test_a_file_for_which_there_is_no_place_is_refused_before_anything_is_asked_for(tmp_path: Path) -> None:
    import resource

    specs = {name: TensorSpec(torch.float32, (1 << 18,)) for name in "abcde"}
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.zeros(1 << 18)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_safetensors(tmp_path / "five", specs, read)
        assert asked == []
        write_safetensors(tmp_path / "three", {name: specs[name] for name in "abc"}, read)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert asked == ["a", "b", "c"]


def test_where_no_place_can_be_reserved_files_are_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_function", lambda *signature: None)
    tensors = some_tensors()
    write_safetensors(tmp_path / "a.safetensors", specs_of(tensors), tensors.__getitem__)
    assert set(load_file(tmp_path / "a.safetensors")) == set(some_tensors())


def test_a_tensor_of_another_shape_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not what the header says"):
        write_safetensors(tmp_path / "a.safetensors", {"x": TensorSpec(torch.float32, (2,))}, lambda name: torch.ones(3))


# -- damaged files


def written(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


DAMAGED = {
    "not JSON": b"{nonsense",
    "not text": b'{"\xff": 1}',
    "deeply nested": b"[" * 100_000,
    "a list": [],
    "unknown type": {"x": entry(dtype="F33")},
    "no shape": {"x": {"dtype": "F32", "data_offsets": [0, 8]}},
    "negative size": {"x": entry(shape=[-2])},
    "size that is no number": {"x": entry(shape=["2"])},
    "size that is a truth value": {"x": entry(shape=[2, True])},
    "three offsets": {"x": entry(data_offsets=[0, 4, 8])},
    "offsets beyond the file": {"x": entry(shape=[4], data_offsets=[0, 16])},
    "offsets that overlap": {"x": entry(shape=[1], data_offsets=[0, 4]), "y": entry(data_offsets=[0, 8])},
    "a hole": {"x": entry(shape=[1], data_offsets=[4, 8])},
    "bytes left over": {"x": entry(shape=[1], data_offsets=[0, 4])},
    "more bytes than the shape has": {"x": entry(shape=[1])},
    "a huge shape": {"x": entry(shape=[1 << 40, 1 << 40])},
    "a name twice": json.dumps({"x": entry(), "y": entry()}).replace('"y"', '"x"').encode(),
}


@pytest.mark.parametrize("header", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_header_is_an_error_that_names_the_file(tmp_path: Path, header: Any) -> None:
    path = written(tmp_path / "a.safetensors", header)
    with pytest.raises(CheckpointError) as error:
        SafetensorsFile(path)
    assert error.value.where == str(path)


def test_a_good_header_is_none_of_these(tmp_path: Path) -> None:
    assert SafetensorsFile(written(tmp_path / "a.safetensors", {"x": entry()})).specs == {"x": TensorSpec(torch.float32, (2,))}


@pytest.mark.parametrize("size", [0, 7, 8, 20, 200, -1])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.safetensors"
    save_file(some_tensors() | {"transposed": torch.ones(1)}, path)
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(CheckpointError) as error:
        SafetensorsFile(path)
    assert error.value.where == str(path)


def test_a_file_truncated_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(100)}, path)
    file = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CheckpointError, match="truncated while"):
        file.read("x")


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        SafetensorsFile(tmp_path / "none.safetensors")
