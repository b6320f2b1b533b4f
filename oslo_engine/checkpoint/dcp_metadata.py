"""The ``.metadata`` file of torch.distributed.checkpoint: a pickle, read without executing anything that stands in it.

The few classes it may name are replaced by plain records, so that neither they nor torch.distributed are needed.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oslo_engine.checkpoint.ranges import TensorSpec
from oslo_engine.errors import CheckpointError

DCP_METADATA = ".metadata"

_RECORDS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


def read_metadata(folder: Path) -> tuple[dict[str, TensorSpec], dict[str, list[StoredChunk]]]:
    """The tensors of the model, by their names in its state dict, and their chunks.

    Raises:
        CheckpointError: the file is missing, damaged, or asks for anything but what such a file needs; or it names a file that
            is not there, or outside the folder.
    """
    path = folder / DCP_METADATA
    metadata = _unpickle(path)
    try:
        tensors = {key: entry for key, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
        names = _names_in_model(tensors, metadata.planner_data or {}, path)
        specs = {names[key]: _spec(entry) for key, entry in tensors.items() if key in names}
        chunks: dict[str, list[StoredChunk]] = {name: [] for name in specs}
        sizes = {(key, tuple(chunk.offsets)): tuple(chunk.sizes) for key, entry in tensors.items() for chunk in entry.chunks}
        for index, info in metadata.storage_data.items():
            if index.fqn in names:
                chunks[names[index.fqn]].append(_stored(index, info, sizes, path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "the metadata is damaged", where=str(path), got=f"{type(error).__name__}: {error}", hint="copy the folder again"
        ) from None
    return specs, chunks


def _spec(entry: Any) -> TensorSpec:
    dtype = entry.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no type of tensors")
    return TensorSpec(dtype, tuple(int(size) for size in entry.size))


def _stored(index: Any, info: Any, sizes: Mapping[Any, tuple[int, ...]], path: Path) -> StoredChunk:
    name = info.relative_path
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise CheckpointError(
            "the metadata names a file outside its folder", where=str(path), expected="a plain file name", got=repr(name)
        )
    if not (path.parent / name).is_file():
        raise CheckpointError(
            "a file of the checkpoint is missing", where=str(path.parent / name), expected=f"listed in {path.name}"
        )
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            "the chunks are transformed (compressed or encrypted)", where=str(path), got=info.transform_descriptors
        )
    if min(info.offset, info.length) < 0:
        raise ValueError(f"{index.fqn} lies at {info.offset}, {info.length} bytes")
    offsets = tuple(getattr(index, "offset", None) or ())
    return StoredChunk(offsets, sizes[index.fqn, offsets], name, int(info.offset), int(info.length))


def _names_in_model(tensors: Mapping[str, Any], paths: Mapping[str, Any], where: Path) -> dict[str, str]:
    """Which entries are the model's, and their names in its state dict.

    What was saved may be that state dict, or have it under some key, beside the optimizer's: "model", or the only one there is.
    """
    full = {key: tuple(map(str, paths.get(key, (key,)))) for key in tensors}
    parents = sorted({path[:-1] for path in full.values()})
    chosen = next((parent for parent in parents if parent[-1:] == ("model",)), None)
    if chosen is None and (() in parents or len(parents) == 1):
        chosen = () if () in parents else parents[0]
    if chosen is None:
        raise CheckpointError(
            "it is not clear which tensors are the model's",
            where=str(where),
            expected="those of a state dict, or of one under the key 'model'",
            got=", ".join(".".join(parent) for parent in parents[:4]) or "no tensors",
        )
    return {key: path[-1] for key, path in full.items() if path[:-1] == chosen}


# -- the pickle


class _Record:
    """Stands for an object whose class is not needed."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpickle(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _Unpickler(file).load()
    except OSError as error:
        raise CheckpointError("cannot open the metadata of the checkpoint", where=str(path), got=error.strerror) from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(
            "cannot read the metadata of the checkpoint",
            where=str(path),
            expected="a file that torch.distributed.checkpoint wrote",
            got=f"{type(error).__name__}: {error}",
        ) from None
