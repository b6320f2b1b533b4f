"""Saving a parallelized model, split or merged. Every rank calls these functions; an error on one of them is raised on all."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from oslo_engine.checkpoint.agree import together
from oslo_engine.checkpoint.atomic import MANIFEST, abandoned_on_error, begin, commit, staging_folder, sync
from oslo_engine.checkpoint.checksums import FileRecord, record_of
from oslo_engine.checkpoint.layout import Layout, Serialization, layout_of
from oslo_engine.checkpoint.merge import Merged
from oslo_engine.checkpoint.merged_names import with_merged_names
from oslo_engine.checkpoint.names import as_transformers_class
from oslo_engine.checkpoint.place import find
from oslo_engine.checkpoint.safetensors_io import TensorSpec, write_order, write_safetensors
from oslo_engine.checkpoint.skeleton import transformers_class
from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.errors import CheckpointError, UnsupportedError
from oslo_engine.rewrite.state import ParallelState, parallel_state

WHAT = "saving the model"
PARTS = "parts"  # where a merged save keeps the ranks' files until they are put together

SaveFunction = Callable[[dict[str, Tensor], str], Any]


def save_split(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    save_function: SaveFunction | None = None,
    safe_serialization: bool | None = None,
    save_config: bool = True,
) -> None:
    """Write one file per tp and pp rank, ``config.json``, and ``layout.json`` that says what stands where.

    A checkpoint that is there is replaced in one step at the end; other files in the folder stay.

    Args:
        save_function: ``torch.save``, or something that is called like it; the files are then ``pytorch_model_tp=?_pp=?.bin``.
        safe_serialization: False is short for ``save_function=torch.save``; True insists on safetensors.
        save_config: whether to write ``config.json`` and ``generation_config.json``.

    Raises:
        CheckpointError: some rank cannot write, or the model does not hold what its plan says.
        UnsupportedError: the settings contradict each other, or the model has parameters that its plan does not know.

    Communication: a few all-gathers of small objects over all ranks.
    """
    if save_function is not None and safe_serialization:
        raise UnsupportedError(
            "save_function writes .bin files", where="safe_serialization=True", hint="leave out one of the two settings"
        )
    if safe_serialization is False and save_function is None:
        save_function = torch.save
    target, state = Path(directory), parallel_state(model)
    staging = staging_folder(target)
    with abandoned_on_error(target, here=leads(state)):
        together(lambda: begin(target) if leads(state) else None, what=WHAT)
        layout = write_parts(
            agree_on_layout(model, state, save_function), state, staging, model_reader(model, state), save_function
        )
        together(lambda: _finish(model, layout, staging, target, save_config) if leads(state) else None, what=WHAT)


def save_merged(
    model: PreTrainedModel, directory: str | Path, *, max_shard_size: int | str = "50GB", save_config: bool = True
) -> None:
    """Write what ``save_pretrained`` of the unsplit model writes; it needs no oslo_engine to be loaded.

    The ranks write their parts into the hidden folder, and rank 0 puts them together, holding about one tensor at a time.

    Args: as of ``save_pretrained`` and ``save_split``. Raises and Communication: as ``save_split``.
    """
    target, state = Path(directory), parallel_state(model)
    staging = staging_folder(target)

    def prepare() -> None:
        begin(target)
        (staging / PARTS).mkdir()

    def put_together() -> None:
        layout.write(staging / PARTS / MANIFEST)
        Merged(SplitSource(staging / PARTS), max_shard_size=max_shard_size, skeleton=model).write(staging)
        shutil.rmtree(staging / PARTS)
        _finish(model, None, staging, target, save_config)

    with abandoned_on_error(target, here=leads(state)):
        together(lambda: prepare() if leads(state) else None, what=WHAT)
        layout = write_parts(agree_on_layout(model, state), state, staging / PARTS, model_reader(model, state))
        together(lambda: put_together() if leads(state) else None, what=WHAT)


def leads(state: ParallelState) -> bool:
    return (state.mesh.at.pp_rank, state.mesh.at.dp_rank, state.mesh.at.tp_rank) == (0, 0, 0)


def _finish(model: PreTrainedModel, layout: Layout | None, staging: Path, target: Path, save_config: bool) -> None:
    if save_config:
        write_config(model, staging)
    if layout is not None:
        layout.with_configs(staging).write(staging / MANIFEST)
    commit(staging, target)


# -- the files of the ranks


Reader = Callable[[str], Tensor]


def agree_on_layout(model: PreTrainedModel, state: ParallelState, save_function: SaveFunction | None = None) -> Layout:
    """What will be written, by all ranks. Only the leading rank's layout is complete in what a merge needs.

    Communication: one all-gather of small objects over all ranks.
    """
    dtypes = _agree_on_dtypes(together(lambda: _dtypes_here(model, state), what=WHAT))
    serialization: Serialization = "safetensors" if save_function is None else "torch"
    layout = layout_of(state.plan, dtypes, serialization, policy_hash=state.policy_hash)
    return with_merged_names(layout, model) if leads(state) else layout


def model_reader(model: PreTrainedModel, state: ParallelState) -> Reader:
    """Gives this rank's tensors as they are when they are asked for."""

    def read(name: str) -> Tensor:
        tensor = state.plan.tensor(name)
        value, shape = local_tensor(find(model, tensor)), tensor.local_shape(state.mesh.at.tp_rank)
        if tuple(value.shape) != shape or value.is_meta:
            raise CheckpointError(
                "a tensor of the model is not what its plan says",
                where=name,
                expected=str(shape),
                got=f"{value.device} {tuple(value.shape)}",
                hint="parameters that an optimizer has divided (ZeRO 3) must be gathered first",
            )
        return value

    return read


def write_parts(
    layout: Layout,
    state: ParallelState,
    folder: Path,
    read: Reader,
    save_function: SaveFunction | None = None,
    *,
    group: Any = None,
) -> Layout:
    """Write this rank's file of a layout.

    Args:
        read: gives this rank's part of a tensor. Every data-parallel rank asks for all of its tensors, in the same order, since
            FSDP gathers them then.
        group: see ``together``.

    Returns:
        The layout, with what all files are.

    Communication: one all-gather of small objects over all ranks.
    """
    written = together(lambda: _write_part(layout, state, folder, read, save_function), what=WHAT, group=group)
    files = {name: record for part in written if part is not None for name, record in [part]}
    return dataclasses.replace(layout, files={name: files[name] for name in layout.file_names()})


def _write_part(
    layout: Layout, state: ParallelState, folder: Path, read: Reader, save_function: SaveFunction | None
) -> tuple[str, FileRecord] | None:
    at = state.mesh.at
    name = layout.file_name(at.tp_rank, at.pp_rank)
    specs = {tensor.name: tensor.local_spec(at.tp_rank) for tensor in layout.stored_in(at.tp_rank, at.pp_rank)}
    to_come = write_order(specs)

    def next_one(tensor_name: str) -> Tensor:
        to_come.remove(tensor_name)
        return read(tensor_name)

    try:
        return _write_file(folder / name, specs, next_one, save_function) if at.dp_rank == 0 else None
    finally:  # the other data-parallel ranks, and this one where it failed, take part in gathering what FSDP has divided
        for tensor_name in list(to_come):
            read(tensor_name)


def _write_file(
    path: Path, specs: dict[str, TensorSpec], read: Reader, save_function: SaveFunction | None
) -> tuple[str, FileRecord]:
    if save_function is None:
        return path.name, write_safetensors(path, specs, read)
    save_function({name: _alone(read(name).cpu()) for name in write_order(specs)}, str(path))
    sync(path)
    return path.name, record_of(path)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's tensor, gathered where FSDP has divided it over the data-parallel ranks."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _alone(tensor: Tensor) -> Tensor:
    """A copy, if it is a view: ``torch.save`` writes the whole memory behind a tensor."""
    own = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    return tensor if own else tensor.clone(memory_format=torch.contiguous_format)


def _dtypes_here(model: PreTrainedModel, state: ParallelState) -> dict[str, torch.dtype]:
    for name, parameter in model.named_parameters():
        if not state.plan.knows(name):
            raise UnsupportedError(
                "the model has a parameter that was added after it was parallelized",
                where=name,
                got=f"{type(parameter).__name__} {tuple(parameter.shape)}",
                hint="add parameters before parallelize, or save them apart",
            )
    return {tensor.name: find(model, tensor).dtype for tensor in state.held() if tensor.persistent}


def _agree_on_dtypes(of_ranks: list[dict[str, torch.dtype]]) -> dict[str, torch.dtype]:
    dtypes: dict[str, torch.dtype] = {}
    for of_rank in of_ranks:
        for name, dtype in of_rank.items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise CheckpointError(
                    "a parameter has different types on different ranks", where=name, expected=dtypes[name], got=dtype
                )
    return dtypes


# -- the config


def write_config(model: PreTrainedModel, folder: Path) -> None:
    cls = transformers_class(type(model))
    config = copy.deepcopy(model.config)
    config.architectures = [cls.__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    if cls.is_remote_code():
        with as_transformers_class(model):
            custom_object_save(model, folder, config=cast(Any, config))
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
