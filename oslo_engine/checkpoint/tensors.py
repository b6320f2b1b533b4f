"""Named tensors that are read slice by slice, and the two kinds of files that hold them."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oslo_engine.checkpoint.ranges import Piece, ReadOnlyFile, StoredArray, TensorSpec, consecutive, resized
from oslo_engine.checkpoint.safetensors_io import SafetensorsFile
from oslo_engine.errors import CheckpointError
from oslo_engine.shards import Span


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
    def read_into(self, name: str, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
        """Read the entries from ``start`` to ``stop`` along ``dim`` into ``out`` from ``at`` on, for each (start, stop, at).

        Only these bytes are read, as far as the form of the checkpoint allows it.

        Args:
            out: contiguous, on the CPU, with the type and shape of the tensor except along ``dim``.
        """

    def read(self, name: str, dim: int | None = None, spans: Sequence[Span] | None = None) -> Tensor:
        """A tensor, or the concatenation of ``spans`` along ``dim`` of it, in memory of its own on the CPU."""
        shape = self.shape(name)
        if dim is None or spans is None:
            dim, spans = 0, ((0, shape[0] if shape else 1),)
        pieces, size = consecutive(spans)
        out = torch.empty(resized(shape, dim, size), dtype=self.dtype(name))
        self.read_into(name, out, dim, pieces)
        return out

    def shape(self, name: str) -> tuple[int, ...]:
        return self.spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.spec(name).dtype

    def identity(self, name: str) -> object:
        """Equal for two names of the same stored tensor."""
        return name

    def verify(self, part: int = 0, parts: int = 1, *, thorough: bool = False) -> None:  # noqa: B027
        """Compare the files, or every ``parts``-th of them from ``part`` on, with the checksums that were saved with them.

        Does nothing for forms that have no checksums.

        Args:
            thorough: compare all checksums of a file, not only the fastest.

        Raises:
            CheckpointError: a file was altered.
        """


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

    def read_into(self, name: str, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
        self._file_of[name].read_into(name, out, dim, pieces)


class PickledSource(TensorSource):
    """One or several files written by ``torch.save``, unpickled with ``weights_only``; slices are read from where they lie."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        for path in paths:
            if not path.is_file():
                raise CheckpointError("a file of the checkpoint is missing", where=str(path))

    @cached_property
    def _file_of(self) -> Mapping[str, _PickledFile]:
        file_of: dict[str, _PickledFile] = {}
        for file in map(_PickledFile, self._paths):
            for name in file.tensors:
                if name in file_of:
                    raise _twice(name, file_of[name].path, file.path)
                file_of[name] = file
        return file_of

    def names(self) -> Sequence[str]:
        return list(self._file_of)

    def spec(self, name: str) -> TensorSpec:
        tensor = self._file_of[name].tensors[name]
        return TensorSpec(tensor.dtype, tuple(tensor.shape))

    def identity(self, name: str) -> object:
        file = self._file_of[name]
        tensor = file.tensors[name]
        storage = tensor.untyped_storage()
        place = getattr(storage, "_checkpoint_offset", storage._cdata)
        return (file.path, place, tensor.storage_offset(), tensor.shape, tensor.stride())

    def read_into(self, name: str, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
        self._file_of[name].read_into(name, out, dim, pieces)


class _PickledFile:
    """Without the values of its tensors, if it has the form in which they can be read one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = load_pickled(path, "meta" if zipfile.is_zipfile(path) else "cpu")
        self._file = ReadOnlyFile(path)

    def read_into(self, name: str, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
        tensor = self.tensors[name]
        array = stored_array(tensor) if tensor.is_meta else None
        if array is not None:
            self._file.read_into(array, out, dim, pieces)
        else:
            copy_pieces(self._mapped[name] if tensor.is_meta else tensor, out, dim, pieces)

    @cached_property
    def _mapped(self) -> Mapping[str, Tensor]:
        return load_pickled(self.path)


def stored_array(tensor: Tensor) -> StoredArray | None:
    """Where a tensor that ``torch.load`` put on meta lies in its file; None if not in one piece, or torch does not say."""
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start is None or not tensor.is_contiguous():
        return None
    return StoredArray(TensorSpec(tensor.dtype, tuple(tensor.shape)), start + tensor.storage_offset() * tensor.element_size())


def copy_pieces(tensor: Tensor, out: Tensor, dim: int, pieces: Sequence[Piece]) -> None:
    """``TensorSource.read_into`` of a tensor in memory."""
    if tensor.ndim == 0:
        out.copy_(tensor)
        return
    for start, stop, at in pieces:
        out.narrow(dim, at, stop - start).copy_(tensor.narrow(dim, start, stop - start))


def load_pickled(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of a ``torch.save`` file, without executing anything that stands in it.

    Args:
        device: "cpu", which maps the file if it can be mapped; or "meta" for tensors without values.

    Raises:
        CheckpointError: the file is damaged, or holds something else than named tensors.
    """
    try:
        loaded: Any = torch.load(
            path, map_location=device, weights_only=True, mmap=device == "cpu" and zipfile.is_zipfile(path)
        )
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, ... for damaged files
        raise CheckpointError(
            "cannot load a file of the checkpoint",
            where=str(path),
            got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        ) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(key, str) and isinstance(t, Tensor) for key, t in loaded.items()):
        raise CheckpointError("the file holds something else than named tensors", where=str(path), got=type(loaded).__name__)
    return dict(loaded)


def _twice(name: str, first: Path, second: Path) -> CheckpointError:
    return CheckpointError(f"{name!r} stands in two files", where=str(second), got=f"also in {first}")
