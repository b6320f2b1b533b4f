"""What stands in a checkpoint folder besides weights, and where a new one may be written."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from oslo_engine.checkpoint.atomic import abandoned_on_error, begin, commit, is_checkpoint_file
from oslo_engine.checkpoint.dcp import is_dcp_folder
from oslo_engine.checkpoint.skeleton import meta_model
from oslo_engine.checkpoint.source import floating_dtype
from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.errors import CheckpointError, UnsupportedError

CONFIG = "config.json"
# Of files that are no part of a checkpoint that we know: weights of other libraries, or pickles.
FOREIGN = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".ot", ".pkl", ".pt", ".pth", ".safetensors"}

Progress = Callable[[int, int], None]  # (bytes written, bytes in all)


def check_target(source: Path, target: Path, *, overwrite: bool) -> None:
    """Refuse to write a checkpoint where one is, or where it is read from, or over other files.

    Raises:
        CheckpointError: the target is the source, is a file, or has a checkpoint, or a file that is taken over from the source,
            which was not to be overwritten.
    """
    if os.path.realpath(source) == os.path.realpath(target):
        raise CheckpointError(
            "the checkpoint would be written over itself", where=str(target), expected="another folder than the source"
        )
    if target.exists() and not target.is_dir():
        raise CheckpointError("the place to write to is a file", where=str(target), expected="a folder, or nothing yet")
    there = sorted(path.name for path in target.iterdir() if is_checkpoint_file(path.name)) if target.exists() else []
    if there and not overwrite:
        raise CheckpointError(
            "the folder has a checkpoint already",
            where=str(target),
            got=", ".join(there[:3]) + (", ..." if len(there) > 3 else ""),
            hint="choose another folder, or allow it to be replaced (--overwrite)",
        )
    there = [path.name for path in other_files(source) if (target / path.name).exists()] if source.is_dir() else []
    if there and not overwrite:
        raise CheckpointError(
            "the folder has files that would be replaced",
            where=str(target),
            got=", ".join(there[:3]) + (", ..." if len(there) > 3 else ""),
            hint="choose another folder, or allow it (--overwrite)",
        )


class Verification:
    """Comparing a checkpoint's files with their checksums on a thread of its own, from now on until ``with`` ends.

    Where the work inside fails, it stops after the file at which it is.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source, self._wanted = source, True
        self._thread = ThreadPoolExecutor(1)
        self._result = self._thread.submit(self._verify)

    def __enter__(self) -> Verification:
        return self

    def __exit__(self, *error: object) -> None:
        self._wanted = False
        self._thread.shutdown()

    def _verify(self) -> None:
        parts = len(self._source.layout.file_names()) if isinstance(self._source, SplitSource) else 1
        for part in range(parts):
            if self._wanted:
                self._source.verify(part, parts)

    def so_far(self) -> None:
        """Raise CheckpointError if a file was found to be altered."""
        if self._result.done():
            self._result.result()

    def end(self) -> None:
        """The same when all were compared."""
        self._result.result()


@contextlib.contextmanager
def replacing(
    source: Path, target: Path, verification: Verification, num_bytes: int, progress: Progress | None, *, overwrite: bool
) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """A folder to write a new checkpoint into, which is put in place at the end, if the source proves to be unaltered.

    Args:
        verification: of the source.
        num_bytes: of all tensors that will be written.
        overwrite: see ``check_target``.

    Returns:
        (the folder, what must be told of bytes that were written; it raises what was found so far: no need to go on)

    Raises:
        CheckpointError: the source was altered, or the target cannot be written (a full disk, another save).
    """
    done = 0

    def written(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, num_bytes)
        verification.so_far()

    try:
        staging = begin(target)
        with abandoned_on_error(target):
            check_target(source, target, overwrite=overwrite)  # another process may have written there meanwhile
            for path in other_files(source):
                shutil.copyfile(path, staging / path.name)
            yield staging, written
            verification.end()
            commit(staging, target)
    except OSError as error:
        raise CheckpointError("cannot write the checkpoint", where=str(target), got=error.strerror or str(error)) from error


def other_files(folder: Path) -> list[Path]:
    """The config, the tokenizer and so on: files that a converted checkpoint takes over as they are."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and not is_checkpoint_file(path.name) and not path.name.startswith(".") and path.suffix not in FOREIGN
    )


def config_of(folder: Path) -> PretrainedConfig:
    """The config in a checkpoint folder.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file() and is_dcp_folder(folder):  # a Trainer puts these files into a folder of their own
        path = folder.parent / CONFIG
    if not path.is_file():
        raise CheckpointError("the checkpoint has no config", where=str(path), hint="copy the model's config.json there")
    try:
        return AutoConfig.from_pretrained(path.parent)
    except Exception as error:  # what json, Transformers and the config's own checks raise
        raise CheckpointError(
            "the config cannot be read", where=str(path), got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from None


def model_of(folder: Path, source: TensorSource) -> PreTrainedModel:
    """The model that a checkpoint folder is about, without weights: its class by the layout or the config.

    Raises:
        CheckpointError: the config is missing or names no class of Transformers, or does not fit the class.
        UnsupportedError: the weights are quantized.
    """
    config = config_of(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError("quantized checkpoints cannot be split", where=str(folder), hint="dequantize it first")
    name = source.layout.model if isinstance(source, SplitSource) else next(iter(config.architectures or ()), None)
    cls = _class_of(name, folder)
    if not isinstance(config, cls.config_class):
        raise CheckpointError(
            "the config is that of another model",
            where=str(folder / CONFIG),
            expected=f"{cls.config_class.__name__}, for {name}",
            got=type(config).__name__,
        )
    dtype = config.dtype or floating_dtype(source) or torch.get_default_dtype()
    try:
        return meta_model(cls, config, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    except Exception as error:  # whatever a constructor raises for sizes that it cannot use
        raise CheckpointError(
            "the model class cannot be built from this config",
            where=str(folder / CONFIG),
            got=f"{type(error).__name__}: {error}",
        ) from error


def _class_of(name: str | None, folder: Path) -> Any:
    import transformers

    cls = getattr(transformers, name, None) if name else None
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise CheckpointError(
            "the model class of the checkpoint is not known",
            where=str(folder / CONFIG),
            expected="architectures: [NAME], a model class of Transformers",
            got=name,
        )
    return cls
