"""Opening a checkpoint, whatever form it has, to read the slices that are wanted.

    source = open_source("folder")
    rows = source.read("model.embed_tokens.weight", dim=0, spans=[(0, 500)])

Forms: one safetensors file; several with an index; ``pytorch_model.bin``, one or several; a split checkpoint of any tp and pp;
a folder of torch.distributed.checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from oslo_engine.checkpoint.agree import together
from oslo_engine.checkpoint.atomic import MANIFEST, MOVING, recover, staging_folder
from oslo_engine.checkpoint.dcp import DcpSource, is_dcp_folder
from oslo_engine.checkpoint.dcp_metadata import DCP_METADATA
from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.checkpoint.tensors import PickledSource, SafetensorsSource, TensorSource
from oslo_engine.errors import CheckpointError

SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


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
    forms = [*([MANIFEST] if (path / MANIFEST).exists() else []), *merged[:1], *(["DCP files"] if is_dcp_folder(path) else [])]
    if len(forms) > 1:
        raise CheckpointError(
            "two checkpoints stand in one folder",
            where=str(path),
            got=f"{forms[0]} and {forms[1]}",
            hint="delete or move one of them",
        )
    if forms == [MANIFEST]:
        return SplitSource(path)
    if forms == ["DCP files"]:
        return DcpSource(path)
    if not merged:
        patterns = ("*_tp=*_pp=*", "model-*-of-*", "pytorch_model-*-of-*")
        left = sorted(file.name for pattern in patterns for file in path.glob(pattern))
        raise CheckpointError(
            "the folder has no checkpoint",
            where=str(path),
            expected=f"{MANIFEST} (split), {', '.join((*SINGLE_FILES, *INDEX_FILES))}, {DCP_METADATA}",
            got=f"{left[0]} without {MANIFEST if '_tp=' in left[0] else 'its index'}" if left else None,
        )
    if merged[0] in INDEX_FILES:
        return _from_index(path / merged[0])
    return _from_files([path / merged[0]])


def verify_source(source: TensorSource) -> None:
    """Compare the files with their checksums, each rank a part. Collective; an altered file is an error on every rank."""
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
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "the index is damaged",
            where=str(index),
            expected='a JSON object with a "weight_map"',
            got=f"{type(error).__name__}: {error}",
        ) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise CheckpointError(
                "the index names a file outside its folder", where=str(index), expected="a plain file name", got=repr(name)
            )
        if not (index.parent / name).is_file():
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
