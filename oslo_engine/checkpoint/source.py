"""Reading tensors from a checkpoint, whatever form it has, by the slices that are wanted.

    source = open_source("folder")
    rows = source.read("model.embed_tokens.weight", dim=0, spans=[(0, 500)])

Forms: one safetensors file; several with an index; ``pytorch_model.bin``, one or several; a split checkpoint of any tp and pp.
"""

from __future__ import annotations

import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_engine.checkpoint.agree import together
from oslo_engine.checkpoint.atomic import MANIFEST, MOVING, recover, staging_folder
from oslo_engine.checkpoint.safetensors_io import SafetensorsFile, TensorSpec
from oslo_engine.errors import CheckpointError
from oslo_engine.shards import Span

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class TensorSource(ABC):
    """Named tensors that are read slice by slice.

    ``native``: whether the names are those of the model class as they are, rather than of a file that Transformers would load,
    which renames and converts some on the way.
    """

    native = False

    @abstractmethod
    def names(self) -> Sequence[str]: ...

    @abstractmethod
    def spec(self, name: str) -> TensorSpec: ...

    @abstractmethod
    def read(self, name: str, dim: int | None = None, spans: Sequence[Span] | None = None) -> Tensor:
        """A tensor, or the concatenation of ``spans`` along ``dim`` of it, in memory of its own on the CPU.

        Only the bytes of the spans are read, as far as the form of the checkpoint allows it.
        """

    def shape(self, name: str) -> tuple[int, ...]:
        return self.spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.spec(name).dtype

    def identity(self, name: str) -> object:
        """Equal for two names of the same stored tensor."""
        return name

    def verify(self, part: int = 0, parts: int = 1) -> None:  # noqa: B027
        """Compare the files, or every ``parts``-th of them from ``part`` on, with the checksums that were saved with them.

        Does nothing for forms that have no checksums.

        Raises:
            CheckpointError: a file was altered.
        """


def open_source(path: str | Path | Sequence[str | Path]) -> TensorSource:
    """Open a checkpoint: a folder, one file, or the list of files that together are one.

    Raises:
        CheckpointError: there is none, or a file is missing, left over, truncated or damaged; it names the file.
    """
    if not isinstance(path, str | Path):
        return _from_files([Path(file) for file in path])
    path = Path(path)
    if path.is_file():
        return _from_files([path])
    _finish_interrupted_save(path)
    if not path.is_dir():
        raise CheckpointError("there is no such checkpoint", where=str(path), expected="a folder or a file")
    merged = [name for name in (*SINGLE_FILES, *INDEX_FILES) if (path / name).exists()]
    if (path / MANIFEST).exists():
        if merged:
            raise CheckpointError(
                "two checkpoints stand in one folder",
                where=str(path),
                got=f"{MANIFEST} and {merged[0]}",
                hint="delete or move one of them",
            )
        from oslo_engine.checkpoint.split import SplitSource

        return SplitSource(path)
    if not merged:
        patterns = ("*_tp=*_pp=*", "model-*-of-*", "pytorch_model-*-of-*")
        left = sorted(file.name for pattern in patterns for file in path.glob(pattern))
        raise CheckpointError(
            "the folder has no checkpoint",
            where=str(path),
            expected=f"{MANIFEST} (split), {', '.join((*SINGLE_FILES, *INDEX_FILES))}",
            got=f"{left[0]} without {MANIFEST if '_tp=' in left[0] else 'its index'}" if left else None,
        )
    if merged[0] in INDEX_FILES:
        return _from_index(path / merged[0])
    return _from_files([path / merged[0]])


def verify_source(source: TensorSource) -> None:
    """Compare the files with their checksums, each rank a part of them. Collective; an altered file is an error on every rank."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    together(lambda: source.verify(rank, ranks), what="checking the checkpoint")


def floating_dtype(source: TensorSource) -> torch.dtype | None:
    """The type of the first floating-point tensor: what ``dtype="auto"`` means where the config does not say."""
    return next((dtype for name in source.names() if (dtype := source.dtype(name)).is_floating_point), None)


def _finish_interrupted_save(folder: Path) -> None:
    try:
        recover(folder)
    except OSError as error:
        if (staging_folder(folder) / MOVING).exists():  # else the files are in place
            raise CheckpointError(
                "a save into this folder was interrupted and cannot be finished from here",
                where=str(folder),
                got=str(error),
                hint="open it once with the right to write there",
            ) from None


def _from_index(index: Path) -> TensorSource:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "the index is damaged",
            where=str(index),
            expected='a JSON object with a "weight_map"',
            got=f"{type(error).__name__}: {error}",
        ) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                "the index names a file outside its folder", where=str(index), expected="a plain file name", got=repr(name)
            )
        if not (index.parent / name).exists():
            raise CheckpointError(
                "a file of the checkpoint is missing", where=str(index.parent / name), expected=f"listed in {index.name}"
            )
    source = _from_files([index.parent / name for name in names])
    there = set(source.names())
    for tensor, name in weight_map.items():
        if tensor not in there:
            raise CheckpointError(
                f"a file lacks {tensor!r}", where=str(index.parent / name), expected=f"all that {index.name} lists for it"
            )
    return source


def _from_files(paths: Sequence[Path]) -> TensorSource:
    kinds = {path.suffix for path in paths}
    if kinds == {".safetensors"}:
        return SafetensorsSource(paths)
    if kinds and kinds <= {".bin", ".pt", ".pth"}:
        return PickledSource(paths)
    raise CheckpointError("unknown checkpoint files", where=", ".join(map(str, paths)), expected="*.safetensors or *.bin")


class SafetensorsSource(TensorSource):
    """One or several safetensors files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._file_of: dict[str, SafetensorsFile] = {}
        for path in paths:
            file = SafetensorsFile(path)
            for name in file.specs:
                if name in self._file_of:
                    raise _twice(name, self._file_of[name].path, path)
                self._file_of[name] = file

    def names(self) -> Sequence[str]:
        return list(self._file_of)

    def spec(self, name: str) -> TensorSpec:
        return self._file_of[name].specs[name]

    def read(self, name: str, dim: int | None = None, spans: Sequence[Span] | None = None) -> Tensor:
        return self._file_of[name].read(name, dim, spans)


class PickledSource(TensorSource):
    """One or several files written by ``torch.save``: unpickled with ``weights_only``, mapped, and slices copied out of them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        for path in paths:
            if not path.is_file():
                raise CheckpointError("a file of the checkpoint is missing", where=str(path))

    @cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        path_of: dict[str, Path] = {}
        for path in self._paths:
            for name, tensor in load_pickled(path).items():
                if name in tensors:
                    raise _twice(name, path_of[name], path)
                tensors[name], path_of[name] = tensor, path
        return tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        tensor = self._tensors[name]
        return TensorSpec(tensor.dtype, tuple(tensor.shape))

    def identity(self, name: str) -> object:
        tensor = self._tensors[name]
        return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())

    def read(self, name: str, dim: int | None = None, spans: Sequence[Span] | None = None) -> Tensor:
        return cut(self._tensors[name], dim, spans)


def cut(tensor: Tensor, dim: int | None, spans: Sequence[Span] | None) -> Tensor:
    """A copy of the concatenation of ``spans`` along ``dim``, or of the whole tensor."""
    if dim is None or spans is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in spans]
    return torch.cat(pieces or [tensor.narrow(dim, 0, 0)], dim)


def load_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a ``torch.save`` file, without executing anything that stands in it.

    Raises:
        CheckpointError: the file is damaged, or holds something else than named tensors.
    """
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ... for damaged files
        raise CheckpointError(
            "cannot load a file of the checkpoint", where=str(path), got=f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(key, str) and isinstance(t, Tensor) for key, t in loaded.items()):
        raise CheckpointError("the file holds something else than named tensors", where=str(path), got=type(loaded).__name__)
    return dict(loaded)


def _twice(name: str, first: Path, second: Path) -> CheckpointError:
    return CheckpointError(f"{name!r} stands in two files", where=str(second), got=f"also in {first}")
