"""Going on with a training that ``save_training`` stopped, on the same ranks or on others."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from oslo_engine.checkpoint.agree import together
from oslo_engine.checkpoint.atomic import MANIFEST, recover
from oslo_engine.checkpoint.background import saving_of
from oslo_engine.checkpoint.checksums import FileRecord, check_unaltered
from oslo_engine.checkpoint.optimizer_state import MASTER, Group, fill_groups, name_of, names_of_parameters, put
from oslo_engine.checkpoint.place import find
from oslo_engine.checkpoint.save import leads
from oslo_engine.checkpoint.source import verify_source
from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.checkpoint.training import (
    FORMAT,
    GENERATORS,
    OBJECTS,
    OPTIMIZER,
    RECORD,
    VERSION,
    global_rank,
    kind_of,
    refuse_other_partitions,
)
from oslo_engine.checkpoint.zero import ZeroState, is_zero
from oslo_engine.errors import CheckpointError
from oslo_engine.plan.plan import TensorPlan
from oslo_engine.rewrite.state import ParallelState, parallel_state, parallelized

logger = logging.getLogger(__name__)


def load_training(
    directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **objects: Any
) -> None:
    """Put back what ``save_training`` saved, at whatever tp, pp and dp this model has now.

    Weights are copied into the model's parameters, which an optimizer and DDP may already know. Every rank calls this.

    Args:
        directory: what ``save_training`` was given.
        model, optimizer, objects: as there, made in the same way; ``objects`` get ``load_state_dict()``.

    Random streams of the model go on at their step at any layout. The generators of torch, numpy and Python are put back where
    the layout is the same; at another one they stay as they are.

    Raises:
        CheckpointError: there is none, a file of it is missing or altered, or it does not fit the model or the optimizer.

    Communication: an all-gather of small objects over all ranks for each of these steps.
    """
    whole = parallelized(model)
    refuse_other_partitions(optimizer)
    with parallel_state(whole).mesh.calls.call("loading"):
        _open_and_load(Path(directory), whole, optimizer, objects)


def _open_and_load(folder: Path, whole: Any, optimizer: torch.optim.Optimizer | None, objects: Mapping[str, Any]) -> None:
    state = parallel_state(whole)
    saving_of(state.mesh).wait()
    together(lambda: recover(folder) if leads(state) else None, what="opening the checkpoint")
    record: dict[str, Any] = {}
    sources: list[SplitSource] = []

    def open_all() -> None:
        record.update(read_record(folder))
        _check_asked(folder, record, optimizer, objects)
        if optimizer is not None:
            check_file(folder / OPTIMIZER, record)
        sources.extend(SplitSource(folder, manifest) for manifest in (MANIFEST, *([] if optimizer is None else [OPTIMIZER])))

    together(open_all, what="opening the checkpoint")
    for source in sources:
        verify_source(source)
    packed: dict[str, Any] = {}
    together(lambda: packed.update(_read_packed_files(folder, record, state)), what="loading the training")
    together(lambda: _load(folder, record, packed, sources, whole, state, optimizer, objects), what="loading the training")


def _read_packed_files(folder: Path, record: Mapping[str, Any], state: ParallelState) -> dict[str, Any]:
    """What is not in the form of a split checkpoint; of the generators those of this rank, and only at their own layout."""
    names = {OBJECTS: OBJECTS}
    if record["layout"] == {axis: state.plan.topology.size(axis) for axis in ("tp", "pp", "dp")}:
        names[GENERATORS] = GENERATORS.format(rank=global_rank())
    for name in names.values():
        check_file(folder / name, record)
    return {kind: torch.load(folder / name, map_location="cpu", weights_only=True) for kind, name in names.items()}


def _load(
    folder: Path,
    record: Mapping[str, Any],
    packed: Mapping[str, Any],
    sources: Sequence[SplitSource],
    model: PreTrainedModel,
    state: ParallelState,
    optimizer: torch.optim.Optimizer | None,
    objects: Mapping[str, Any],
) -> None:
    saved = packed[OBJECTS]
    _copy_weights(folder, sources[0], model, state)
    if optimizer is not None:
        _fill(optimizer, sources[1], saved, model, state)
    for name, each in objects.items():
        each.load_state_dict(saved["objects"][name])
    state.streams.seed, state.streams.step = record["random"]["seed"], record["random"]["step"]
    if GENERATORS in packed:
        _set_generators(packed[GENERATORS], state)


def read_record(folder: Path) -> dict[str, Any]:
    """What a training was saved with, and the other files of it.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            "there is no training to go on with", where=str(path), got=str(error), hint="save it with oslo.save_training"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            "the record of the training is damaged", where=str(path), got=str(error), hint="copy the checkpoint again"
        ) from None
    if not isinstance(record, dict) or (record.get("format"), record.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            "this is not the record of a training, or of another version",
            where=str(path),
            expected=f"{FORMAT!r}, version {VERSION}",
            got=str(record)[:100],
        )
    try:
        record["files"] = {name: FileRecord.from_json(entry) for name, entry in record["files"].items()}
        _require_forms(record)
        _require_files(folder, record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            "the record of the training is damaged",
            where=str(path),
            got=f"{type(error).__name__}: {error}",
            hint="copy the checkpoint again",
        ) from None
    return record


def _require_forms(record: Mapping[str, Any]) -> None:
    texts = [*record["objects"], *([] if record["optimizer"] is None else [record["optimizer"]])]
    right = [
        *(type(text) is str for text in texts),
        *(type(size) is int and size > 0 for size in (record["layout"][axis] for axis in ("tp", "pp", "dp"))),
        *(type(record["random"][key]) is int for key in ("seed", "step")),
    ]
    if not all(right) or record["random"]["step"] < 0:
        raise ValueError(f"{ {key: record[key] for key in ('layout', 'random', 'optimizer', 'objects')} } cannot be right")


def _require_files(folder: Path, record: Mapping[str, Any]) -> None:
    """One file of generators for each rank, and none that was left over by another training."""
    ranks = math.prod(record["layout"][axis] for axis in ("tp", "pp", "dp"))
    if ranks > len(record["files"]):
        raise ValueError(f"{ranks} ranks, {len(record['files'])} files")
    listed = {
        OBJECTS,
        *(GENERATORS.format(rank=rank) for rank in range(ranks)),
        *([] if record["optimizer"] is None else [OPTIMIZER]),
    }
    if set(record["files"]) != listed:
        raise ValueError(f"files are {sorted(record['files'])}")
    if left := sorted({path.name for path in folder.glob(GENERATORS.format(rank="*"))} - listed):
        raise ValueError(f"{left[0]} is there, which is not listed")


def _check_asked(folder: Path, record: Mapping[str, Any], optimizer: Any, objects: Mapping[str, Any]) -> None:
    asked, there = set(objects), set(record["objects"])
    if optimizer is not None:
        if record["optimizer"] is None:
            raise CheckpointError("the training was saved without an optimizer", where=str(folder))
        if record["optimizer"] != kind_of(optimizer):
            raise CheckpointError(
                "the training was saved with another optimizer",
                where=str(folder),
                expected=record["optimizer"],
                got=kind_of(optimizer),
            )
    if missing := sorted(asked - there):
        raise CheckpointError(
            "the training was saved without something that is to be loaded",
            where=str(folder),
            expected=", ".join(missing),
            got=", ".join(sorted(there)) or "no objects",
        )
    unused = [*sorted(there - asked), *(["optimizer"] if optimizer is None and record["optimizer"] else [])]
    if unused:
        logger.warning("%s: saved and not loaded: %s", folder, ", ".join(unused))


def check_file(path: Path, record: Mapping[str, Any], *, thorough: bool = False) -> None:
    """Compare a file of a training with its checksum, or with all of them.

    Raises:
        CheckpointError: it is missing or was altered.
    """
    check_unaltered(path, record["files"][path.name], "a file of the training", thorough=thorough)


def _copy_weights(folder: Path, source: SplitSource, model: PreTrainedModel, state: ParallelState) -> None:
    there = set(source.names())
    held = [tensor for tensor in state.held() if tensor.persistent]
    for tensor in held:
        if tensor.name not in there or source.shape(tensor.name) != tensor.shape:
            raise CheckpointError(
                "the training was saved with another model",
                where=f"{tensor.name} in {folder}",
                expected=str(tensor.shape),
                got=str(source.shape(tensor.name)) if tensor.name in there else "no such tensor",
            )
    with torch.no_grad():
        for tensor in held:
            _copy_into(find(model, tensor), _part(source, tensor.name, tensor, state))


def _copy_into(old: Tensor, value: Tensor) -> None:
    if isinstance(old, DTensor):
        value = distribute_tensor(value.to(old.device), old.device_mesh, old.placements)
    old.copy_(value)


def _fill(
    optimizer: torch.optim.Optimizer,
    source: SplitSource,
    saved: Mapping[str, Any],
    model: PreTrainedModel,
    state: ParallelState,
) -> None:
    names = names_of_parameters(model, state)
    parameters = {name: parameter for parameter, name in names.items()}
    fill_groups(optimizer, [Group(tuple(names), options) for names, options in saved["groups"]], names)
    if is_zero(optimizer):
        _fill_zero(ZeroState(optimizer, names), source, saved, state)
        return
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for entry in source.layout.tensors:
        key, _, name = entry.name.partition(":")
        if name in parameters and id(parameters[name]) in optimized:
            value = _part(source, entry.name, state.plan.tensor(name), state)
            if key == MASTER:
                with torch.no_grad():
                    _copy_into(parameters[name], value)
            else:
                put(optimizer, parameters[name], key, value)
    for full_name, value in saved["others"].items():
        key, _, name = full_name.partition(":")
        if name in parameters and id(parameters[name]) in optimized:
            assert name_of(key, name) == full_name
            put(optimizer, parameters[name], key, value)


def _fill_zero(zero: ZeroState, source: SplitSource, saved: Mapping[str, Any], state: ParallelState) -> None:
    keys: dict[str, list[str]] = {}
    for full_name in (*source.names(), *saved["others"]):
        key, _, name = full_name.partition(":")
        keys.setdefault(name, []).append(key)

    def read(key: str, name: str) -> Any:
        full_name = name_of(key, name)
        if full_name in saved["others"]:
            return saved["others"][full_name]
        return _part(source, full_name, state.plan.tensor(name), state)

    zero.fill(keys, read)
    zero.set_loss_scale(saved.get("loss_scale", {}))


def _part(source: TensorSource, name: str, tensor: TensorPlan, state: ParallelState) -> Tensor:
    """This rank's part of what is divided as ``tensor`` is; the whole of something else."""
    if tensor.shard is None or source.shape(name) != tensor.shape:
        return source.read(name)
    return source.read(name, tensor.shard.dim, tensor.shard.spans[state.mesh.at.tp_rank])


def _set_generators(saved: Mapping[str, Any], state: ParallelState) -> None:
    import numpy

    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    kind, keys, *rest = saved["numpy"]
    numpy.random.set_state((kind, keys.numpy(), *rest))
    if "cuda" in saved and state.mesh.device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], state.mesh.device)
