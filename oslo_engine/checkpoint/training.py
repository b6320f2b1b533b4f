"""Stopping a training and going on with it, on the same ranks or on others: weights, optimizer, schedule, random streams.

A training checkpoint is a split checkpoint (which anything that reads one can load) with more files beside it:

    optimizer_tp=?_pp=?.safetensors, optimizer.json    what the optimizer keeps, divided as its parameters are
    objects.pt                                          parameter groups, schedulers, a gradient scaler, a sampler, ...
    random_rank=?.pt                                    the generators of each rank
    training.json                                       what else there is, and what the files must be
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from oslo_engine.checkpoint.agree import together
from oslo_engine.checkpoint.atomic import MANIFEST, abandon, begin, commit, recover, staging_folder, sync
from oslo_engine.checkpoint.background import Saving, saving_of
from oslo_engine.checkpoint.layout import Layout
from oslo_engine.checkpoint.optimizer_state import (
    STEM,
    Group,
    entries_of,
    fill_groups,
    groups_of,
    layout_of_entries,
    merge_groups,
    name_of,
    names_of_parameters,
    put,
    values_of,
)
from oslo_engine.checkpoint.place import find
from oslo_engine.checkpoint.safetensors_io import FileRecord, record_of
from oslo_engine.checkpoint.save import Reader, agree_on_layout, leads, model_reader, write_config, write_parts
from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.errors import CheckpointError
from oslo_engine.plan.plan import TensorPlan
from oslo_engine.rewrite.state import ParallelState, parallel_state

logger = logging.getLogger(__name__)

FORMAT, VERSION = "oslo_engine training state", 1
RECORD, OPTIMIZER, OBJECTS = "training.json", f"{STEM}.json", "objects.pt"
WHAT = "saving the training"


def save_training(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    asynchronous: bool = False,
    **objects: Any,
) -> Saving:
    """Save all that is needed to go on with a training as if it had never stopped.

    A checkpoint that is there is replaced in one step at the end, when every file is on the disk; killed before, the old one is
    still there. Every rank calls this.

    Args:
        directory: the folder; other files in it stay.
        model: parallelized, also wrapped in DDP, or divided by FSDP2.
        optimizer: one that keeps, for each parameter, numbers and tensors of its shape: AdamW, SGD, Lion, ...
        asynchronous: copy everything to the CPU and return; the files are written while training goes on. At most one such
            save runs at a time: the next call waits for it.
        objects: whatever else has a ``state_dict()``, the same on all ranks, under names of your choice: ``scheduler=...``,
            ``scaler=...``, ``sampler=...``.

    Returns:
        A handle; ``wait()`` returns when all is on the disk, and raises what went wrong. Without ``asynchronous`` it is done.

    Raises:
        CheckpointError: some rank cannot write, or a state cannot be read back.
        UnsupportedError: the optimizer keeps something that cannot be divided.

    Communication: a few all-gathers of small objects over all ranks.
    """
    target, whole = Path(directory), _parallelized(model)
    state = parallel_state(whole)
    saving_of(state.mesh).wait()
    staging = staging_folder(target)
    try:
        together(lambda: begin(target) if leads(state) else None, what=WHAT)
        job = _prepare(whole, state, optimizer, objects, copy=asynchronous)
    except BaseException:
        if leads(state):
            abandon(target)
        raise

    def write(group: Any = None) -> None:
        try:
            job.write(staging, group)
            together(lambda: _finish(whole, job, staging, target) if leads(state) else None, what=WHAT, group=group)
        except BaseException:
            if leads(state):
                abandon(target)
            raise

    return saving_of(state.mesh).run(write, in_background=asynchronous)


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
    folder, whole = Path(directory), _parallelized(model)
    state = parallel_state(whole)
    saving_of(state.mesh).wait()
    together(lambda: recover(folder) if leads(state) else None, what="opening the checkpoint")
    together(lambda: _load(folder, whole, state, optimizer, objects), what="loading the training")


def _parallelized(model: nn.Module) -> Any:
    while "_oslo" not in model.__dict__ and isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    parallel_state(model)
    return model


# -- saving


class _Job:
    """Everything that is to be written, read or copied when it was asked for."""

    def __init__(self, state: ParallelState, weights: tuple[Layout, Reader], record: dict[str, Any]) -> None:
        self.state, self.record = state, record
        self.layout, self.read_weight = weights
        self.optimizer: tuple[Layout, Reader] | None = None
        self.objects = b""
        self.generators = b""

    def write(self, folder: Path, group: Any) -> None:
        self.layout = write_parts(self.layout, self.state, folder, self.read_weight, group=group)
        if self.optimizer is not None:
            layout, read = self.optimizer
            self.optimizer = (write_parts(layout, self.state, folder, read, group=group), read)
        mine = {f"random_rank={_rank()}.pt": self.generators} | ({OBJECTS: self.objects} if leads(self.state) else {})
        written = together(lambda: _write_files(folder, mine), what=WHAT, group=group)
        files = {name: record for of_rank in written for name, record in of_rank.items()}
        self.record["files"] = {name: dataclasses.asdict(record) for name, record in files.items()}


def _prepare(
    model: PreTrainedModel,
    state: ParallelState,
    optimizer: torch.optim.Optimizer | None,
    objects: Mapping[str, Any],
    *,
    copy: bool,
) -> _Job:
    topology = state.plan.topology
    record = {
        "format": FORMAT,
        "version": VERSION,
        "layout": {"tp": topology.tp, "pp": topology.pp, "dp": topology.dp},
        "random": {"seed": state.streams.seed, "step": state.streams.step},
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "objects": sorted(objects),
    }
    layout, read = agree_on_layout(model, state), model_reader(model, state)
    if copy:
        stored = [tensor.name for tensor in layout.stored_in(state.mesh.at.tp_rank, state.mesh.at.pp_rank)]
        read = _copied((name, read(name)) for name in stored)
    job = _Job(state, (layout, read), record)
    saved: dict[str, Any] = {}
    if optimizer is not None:
        names = names_of_parameters(model, state)
        seen = together(lambda: (*entries_of(optimizer, names, state), groups_of(optimizer, names)), what=WHAT)
        values = values_of(optimizer, names)
        job.optimizer = (
            layout_of_entries(state.plan, [entries for entries, _, _ in seen]),
            _copied(values) if copy else dict(values).__getitem__,
        )
        saved["groups"] = [(group.parameters, dict(group.options)) for group in merge_groups([groups for _, _, groups in seen])]
        saved["others"] = {name: value for _, others, _ in seen for name, value in others.items()}

    def pack() -> None:
        job.objects = _packed({**saved, "objects": {name: each.state_dict() for name, each in objects.items()}})
        job.generators = _packed(_generators(state))

    together(pack, what=WHAT)
    return job


def _copied(values: Any) -> Reader:
    return {name: value.detach().to("cpu", copy=True) for name, value in values}.__getitem__


def _packed(value: Any) -> bytes:
    """As ``torch.save`` writes it. What cannot be read back safely is refused now and not after the training."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            "a state holds something that cannot be read back safely",
            expected="tensors, numbers, texts, and lists and dicts of them",
            got=str(error).partition("\n")[0],
            hint="leave it out of state_dict()",
        ) from None
    return buffer.getvalue()


def _write_files(folder: Path, contents: Mapping[str, bytes]) -> dict[str, FileRecord]:
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        sync(folder / name)
    return {name: record_of(folder / name) for name in contents}


def _finish(model: PreTrainedModel, job: _Job, staging: Path, target: Path) -> None:
    write_config(model, staging)
    if job.optimizer is not None:
        job.optimizer[0].write(staging / OPTIMIZER)
    (staging / RECORD).write_text(json.dumps(job.record, indent=2) + "\n", encoding="utf-8")
    job.layout.write(staging / MANIFEST)
    commit(staging, target)


# -- loading


def _load(
    folder: Path,
    model: PreTrainedModel,
    state: ParallelState,
    optimizer: torch.optim.Optimizer | None,
    objects: Mapping[str, Any],
) -> None:
    record = _read_record(folder)
    _check_asked(folder, record, optimizer, objects)
    weights = SplitSource(folder)
    saved = _read_packed(folder / OBJECTS, record)
    same_layout = record["layout"] == {axis: state.plan.topology.size(axis) for axis in ("tp", "pp", "dp")}
    generators = _read_packed(folder / f"random_rank={_rank()}.pt", record) if same_layout else None
    _copy_weights(folder, weights, model, state)
    if optimizer is not None:
        _fill(optimizer, SplitSource(folder, OPTIMIZER), saved, model, state)
    for name, each in objects.items():
        each.load_state_dict(saved["objects"][name])
    state.streams.seed, state.streams.step = record["random"]["seed"], record["random"]["step"]
    if generators is not None:
        _set_generators(generators, state)


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "there is no training to go on with", where=str(path), got=str(error), hint="save it with oslo.save_training"
        ) from None
    if not isinstance(record, dict) or (record.get("format"), record.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            "this is not the record of a training, or of another version",
            where=str(path),
            expected=f"{FORMAT!r}, version {VERSION}",
            got=str(record)[:100],
        )
    return record


def _check_asked(folder: Path, record: Mapping[str, Any], optimizer: Any, objects: Mapping[str, Any]) -> None:
    asked, there = set(objects), set(record["objects"])
    if optimizer is not None:
        if record["optimizer"] is None:
            raise CheckpointError("the training was saved without an optimizer", where=str(folder))
        if record["optimizer"] != type(optimizer).__name__:
            raise CheckpointError(
                "the training was saved with another optimizer",
                where=str(folder),
                expected=record["optimizer"],
                got=type(optimizer).__name__,
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


def _read_packed(path: Path, record: Mapping[str, Any]) -> Any:
    wanted = record["files"].get(path.name)
    if wanted is None or not path.is_file():
        raise CheckpointError("a file of the training is missing", where=str(path), expected=f"listed in {RECORD}")
    found = record_of(path)
    if found != FileRecord(wanted["size_bytes"], wanted["sha256"]):
        raise CheckpointError(
            "a file of the training was altered after it was saved",
            where=str(path),
            expected=f"{wanted['size_bytes']} bytes, sha256 {wanted['sha256']}",
            got=f"{found.size_bytes} bytes, sha256 {found.sha256}",
            hint="copy the checkpoint again",
        )
    return torch.load(path, map_location="cpu", weights_only=True)


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
            value, old = _part(source, tensor.name, tensor, state), find(model, tensor)
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
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for entry in source.layout.tensors:
        key, _, name = entry.name.partition(":")
        if name in parameters and id(parameters[name]) in optimized:
            put(optimizer, parameters[name], key, _part(source, entry.name, state.plan.tensor(name), state))
    for full_name, value in saved["others"].items():
        key, _, name = full_name.partition(":")
        if name in parameters and id(parameters[name]) in optimized:
            assert name_of(key, name) == full_name
            put(optimizer, parameters[name], key, value)


def _part(source: TensorSource, name: str, tensor: TensorPlan, state: ParallelState) -> Tensor:
    """This rank's part of what is divided as ``tensor`` is; the whole of something else."""
    if tensor.shard is None or source.shape(name) != tensor.shape:
        return source.read(name)
    return source.read(name, tensor.shard.dim, tensor.shard.spans[state.mesh.at.tp_rank])


# -- generators


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _generators(state: ParallelState) -> dict[str, Any]:
    import numpy

    kind, keys, *rest = numpy.random.get_state(legacy=True)
    assert not isinstance(keys, str)
    found = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, torch.from_numpy(keys.copy()), *rest)}
    if state.mesh.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(state.mesh.device)
    return found


def _set_generators(saved: Mapping[str, Any], state: ParallelState) -> None:
    import numpy

    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    kind, keys, *rest = saved["numpy"]
    numpy.random.set_state((kind, keys.numpy(), *rest))
    if "cuda" in saved and state.mesh.device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], state.mesh.device)
