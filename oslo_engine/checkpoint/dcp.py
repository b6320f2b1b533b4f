"""Reading the folders that torch.distributed.checkpoint writes, in one process and slice by slice.

Two forms: ``.metadata`` with ``__0_0.distcp``, ..., in which every chunk of a tensor is a file of ``torch.save`` within another
file; and ``shard-00001-model-00001-of-00001.safetensors``, ..., as ``save_pretrained(..., distributed_checkpoint=True)`` of
Transformers makes them, whose headers say where in its tensor each chunk begins.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oslo_engine.checkpoint.dcp_metadata import DCP_METADATA, StoredChunk, read_metadata
from oslo_engine.checkpoint.ranges import Piece, ReadOnlyFile, StoredArray, TensorSpec, resized
from oslo_engine.checkpoint.safetensors_io import SafetensorsFile
from oslo_engine.checkpoint.tensors import TensorSource, copy_pieces, stored_array
from oslo_engine.errors import CheckpointError

SAFETENSORS_SHARDS = "shard-*-model-*-of-*.safetensors"

ReadInto = Callable[[Tensor, int, Sequence[Piece]], None]


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor: where it begins, its sizes, and how pieces of it are read."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read_into: ReadInto


class DcpSource(TensorSource):
    """The tensors of the model in such a folder. Its names are those of the model's state dict.

    Raises:
        CheckpointError: a file is missing or damaged, or the chunks of a tensor do not make it up.
    """

    native = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch_form = (folder / DCP_METADATA).exists() or not any(folder.glob(SAFETENSORS_SHARDS))
        self._specs, self._chunks = (_of_torch if torch_form else _of_safetensors)(folder)
        for name, spec in self._specs.items():
            if not _make_up(self._chunks[name], spec.shape):
                raise CheckpointError(
                    f"the files do not have all parts of {name!r}",
                    where=str(folder),
                    expected=f"chunks that fill {spec.shape}",
                    got=", ".join(f"{chunk.sizes} at {chunk.offsets}" for chunk in self._chunks[name][:4]),
                    hint="copy the folder again: the files of all ranks belong together",
                )

    def names(self) -> Sequence[str]:
        return list(self._specs)

    def spec(self, name: str) -> TensorSpec:
        return self._specs[name]

    def read_into(self, name: str, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
        for chunk in self._chunks[name]:
            if not chunk.sizes:
                chunk.read_into(out, dim, pieces)
                return
            start, stop = chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]
            inside = [
                (max(first, start) - start, min(last, stop) - start, at + max(first, start) - first)
                for first, last, at in pieces
                if max(first, start) < min(last, stop)
            ]
            if inside:
                _read_box(chunk, out, dim, inside)


def is_dcp_folder(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in (DCP_METADATA, "__*.distcp", SAFETENSORS_SHARDS))


def _read_box(chunk: _Chunk, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
    """Read pieces of a chunk into its box of the result."""
    box = out
    for each, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        if each != dim:
            box = box.narrow(each, offset, size)
    if box.is_contiguous():
        chunk.read_into(box, dim, pieces)
        return
    size = sum(stop - start for start, stop, _ in pieces)
    part, done = torch.empty(resized(chunk.sizes, dim, size), dtype=out.dtype), 0
    for start, stop, _ in pieces:
        chunk.read_into(part, dim, [(start, stop, done)])
        done += stop - start
    done = 0
    for start, stop, at in pieces:
        box.narrow(dim, at, stop - start).copy_(part.narrow(dim, done, stop - start))
        done += stop - start


def _make_up(chunks: Sequence[_Chunk], shape: Sequence[int]) -> bool:
    """Whether chunks fill a tensor, each entry once: they must be the cells of a grid."""
    cuts = [sorted({chunk.offsets[dim] for chunk in chunks}) for dim in range(len(shape))]
    if any(len(chunk.sizes) != len(shape) for chunk in chunks) or any(cut[:1] != [0] for cut in cuts):
        return math.prod(shape) == 0 and bool(shape)
    size_at = [
        {start: stop - start for start, stop in zip(cut, [*cut[1:], size], strict=True)}
        for cut, size in zip(cuts, shape, strict=True)
    ]
    fit = all(chunk.sizes == tuple(size_at[dim][start] for dim, start in enumerate(chunk.offsets)) for chunk in chunks)
    return fit and len({chunk.offsets for chunk in chunks}) == len(chunks) == math.prod(map(len, cuts))


# -- .metadata and *.distcp


def _of_torch(folder: Path) -> tuple[dict[str, TensorSpec], dict[str, list[_Chunk]]]:
    specs, stored = read_metadata(folder)
    files = {chunk.file: ReadOnlyFile(folder / chunk.file) for chunks in stored.values() for chunk in chunks}
    chunks = {
        name: [
            _Chunk(chunk.offsets, chunk.sizes, _Pickled(files[chunk.file], chunk, specs[name].dtype).read_into)
            for chunk in chunks
        ]
        for name, chunks in stored.items()
    }
    return specs, chunks


class _Pickled:
    """A chunk that is a file of ``torch.save`` within a file; it is looked into when it is first read."""

    def __init__(self, file: ReadOnlyFile, chunk: StoredChunk, dtype: torch.dtype) -> None:
        self._file, self._chunk, self._dtype = file, chunk, dtype
        self._array: StoredArray | Tensor | None = None
        if chunk.start + chunk.length > file.size:
            raise CheckpointError(
                "the file is truncated",
                where=str(file.path),
                expected=f"at least {chunk.start + chunk.length} bytes",
                got=f"{file.size} bytes",
                hint="copy the folder again",
            )

    def read_into(self, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
        if self._array is None:
            self._array = self._look()
        if isinstance(self._array, Tensor):
            copy_pieces(self._array, out, dim, pieces)
        else:
            self._file.read_into(self._array, out, dim, pieces)

    def _look(self) -> StoredArray | Tensor:
        tensor = self._load("meta")
        found = TensorSpec(tensor.dtype, tuple(tensor.shape)) if isinstance(tensor, Tensor) else type(tensor).__name__
        if found != (spec := TensorSpec(self._dtype, self._chunk.sizes)):
            raise CheckpointError(
                "a chunk is not the tensor that the metadata says", where=str(self._file.path), expected=spec, got=found
            )
        array = stored_array(tensor)
        if array is None or array.start + spec.num_bytes > self._chunk.length:
            return self._load("cpu")
        return StoredArray(array.spec, self._chunk.start + array.start)

    def _load(self, device: str) -> Tensor:
        window = io.BufferedReader(_Window(self._file, self._chunk.start, self._chunk.length))
        try:
            loaded: Tensor = torch.load(window, map_location=device, weights_only=True)
        except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ... for damaged files
            raise CheckpointError(
                "cannot load a chunk of the checkpoint",
                where=str(self._file.path),
                got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            ) from error
        return loaded


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: ReadOnlyFile, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read_bytes(self._start + self._at, max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


# -- safetensors of every rank


def _of_safetensors(folder: Path) -> tuple[dict[str, TensorSpec], dict[str, list[_Chunk]]]:
    specs: dict[str, TensorSpec] = {}
    chunks: dict[str, dict[tuple[int, ...], _Chunk]] = {}
    paths = sorted(folder.glob(SAFETENSORS_SHARDS))
    _check_all_ranks(paths)
    for path in paths:
        file = SafetensorsFile(path)
        offsets = _offsets(file)
        for name, spec in file.specs.items():
            at = offsets.get(name, (0,) * len(spec.shape))
            if len(at) != len(spec.shape):
                raise CheckpointError(f"the place of {name!r} is damaged", where=str(path), got=str(at))
            known = specs.get(name, spec).shape
            shape = tuple(max(old, start + size) for old, start, size in zip(known, at, spec.shape, strict=True))
            specs[name] = TensorSpec(spec.dtype, shape)
            if spec.num_bytes or not spec.shape:
                reader = _of_file(file, name)
                chunks.setdefault(name, {}).setdefault(at, _Chunk(at, spec.shape, reader))
            else:
                chunks.setdefault(name, {})
    return specs, {name: list(by_offset.values()) for name, by_offset in chunks.items()}


def _of_file(file: SafetensorsFile, name: str) -> ReadInto:
    return lambda out, dim, pieces: file.read_into(name, out, dim, pieces)


def _offsets(file: SafetensorsFile) -> Mapping[str, tuple[int, ...]]:
    try:
        info = json.loads(file.metadata.get("DCP_SHARDING_INFO", "{}"))
        return {name: tuple(int(start) for start in entry["saved_offsets"]) for name, entry in info.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "the header does not say where the chunks belong",
            where=str(file.path),
            got=f"{type(error).__name__}: {error}",
        ) from None


def _check_all_ranks(paths: Sequence[Path]) -> None:
    """The names count the ranks from 1; the last of them is not known, but a gap is."""
    for number, path in enumerate(paths, 1):
        if path.name.split("-")[1] != f"{number:05d}":
            raise CheckpointError(
                "a file of the checkpoint is missing",
                where=str(path.with_name(path.name.replace(path.name.split("-")[1], f"{number:05d}", 1))),
                expected="the files of all ranks",
            )
