"""Stopping a training so that it can go on, on the same ranks or on others: weights, optimizer, schedule, random streams.

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
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from oslo_engine.checkpoint.agree import together
from oslo_engine.checkpoint.atomic import MANIFEST, abandon, begin, commit, staging_folder, sync
from oslo_engine.checkpoint.background import Saving, saving_of
from oslo_engine.checkpoint.checksums import FileRecord, record_of
from oslo_engine.checkpoint.layout import Layout
from oslo_engine.checkpoint.optimizer_state import (
    STEM,
    Entry,
    Group,
    entries_of,
    groups_of,
    layout_of_entries,
    merge_groups,
    names_of_parameters,
    values_of,
)
from oslo_engine.checkpoint.save import Reader, agree_on_layout, leads, model_reader, write_config, write_parts
from oslo_engine.checkpoint.zero import ZeroState, is_zero
from oslo_engine.errors import CheckpointError, UnsupportedError
from oslo_engine.rewrite.state import ParallelState, parallel_state, parallelized

FORMAT, VERSION = "oslo_engine training state", 1
RECORD, OPTIMIZER, OBJECTS = "training.json", f"{STEM}.json", "objects.pt"
GENERATORS = "random_rank={rank}.pt"
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
        optimizer: one that keeps, for each parameter, numbers and tensors of its shape: AdamW, SGD, Lion, ...; of DeepSpeed's
            ZeRO 1 and 2 ``engine.optimizer``.
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
    whole = parallelized(model)
    refuse_other_partitions(optimizer)
    with parallel_state(whole).mesh.calls.call("saving"):
        return _save(Path(directory), whole, optimizer, objects, asynchronous=asynchronous)


def _save(
    target: Path, whole: Any, optimizer: torch.optim.Optimizer | None, objects: Mapping[str, Any], *, asynchronous: bool
) -> Saving:
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


def refuse_other_partitions(optimizer: Any) -> None:
    """Raises UnsupportedError for what DeepSpeed makes of an optimizer, except for ZeRO 1 and 2."""
    is_wrapper = type(optimizer).__module__.startswith("deepspeed.") and not isinstance(optimizer, torch.optim.Optimizer)
    if is_wrapper and not is_zero(optimizer):
        raise UnsupportedError(
            "DeepSpeed keeps the state of this optimizer in a form of its own, which cannot be divided by parameter",
            expected="ZeRO 1 or 2, or an optimizer of torch.optim",
            got=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
            hint="call engine.save_checkpoint(folder) and engine.load_checkpoint(folder), which want the same layout; "
            "for another layout save the weights alone: oslo.save_training(folder, model)",
        )


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
        mine = {GENERATORS.format(rank=global_rank()): self.generators} | ({OBJECTS: self.objects} if leads(self.state) else {})
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
        "optimizer": None if optimizer is None else kind_of(optimizer),
        "objects": sorted(objects),
    }
    layout, read = agree_on_layout(model, state), model_reader(model, state)
    if copy:
        stored = [tensor.name for tensor in layout.stored_in(state.mesh.at.tp_rank, state.mesh.at.pp_rank)]
        read = _copied((name, read(name)) for name in stored)
    job = _Job(state, (layout, read), record)
    saved: dict[str, Any] = {}
    if optimizer is not None:
        job.optimizer, more = _prepare_optimizer(model, state, optimizer, copy=copy)
        saved |= more

    def pack() -> None:
        states = {name: _state_of(name, each) for name, each in objects.items()}
        try:
            job.objects = _packed({**saved, "objects": states}, WHAT)
        except CheckpointError:
            for name, each in states.items():  # which of them it is
                _packed(each, f"{name}=")
            raise
        job.generators = _packed(_generators(state), WHAT)

    together(pack, what=WHAT)
    return job


def _prepare_optimizer(
    model: PreTrainedModel, state: ParallelState, optimizer: torch.optim.Optimizer, *, copy: bool
) -> tuple[tuple[Layout, Reader], dict[str, Any]]:
    """(what goes into its files, what goes to the objects)"""
    names = names_of_parameters(model, state)
    zero: list[ZeroState] = []

    def look() -> tuple[list[Group], dict[str, dict[str, Entry]], dict[str, Any]]:
        groups = groups_of(optimizer, names)
        if not is_zero(optimizer):
            return groups, *entries_of(optimizer, names, state)
        zero.append(ZeroState(optimizer, names))
        return groups, *zero[0].entries(state.plan)

    seen = together(look, what=WHAT)
    layout = layout_of_entries(state.plan, [entries for _, entries, _ in seen])
    saved: dict[str, Any] = {
        "groups": [(group.parameters, dict(group.options)) for group in merge_groups([groups for groups, _, _ in seen])],
        "others": {name: value for _, _, others in seen for name, value in others.items()},
    }
    if zero:
        return (layout, _zero_reader(zero[0], layout, state, copy=copy)), saved | {"loss_scale": zero[0].loss_scale()}
    values = values_of(optimizer, names)
    return (layout, _copied(values) if copy else dict(values).__getitem__), saved


def _zero_reader(zero: ZeroState, layout: Layout, state: ParallelState, *, copy: bool) -> Reader:
    """Puts tensors together when they are asked for, or all of them now; only the rank that writes them keeps copies."""
    if not copy:
        return zero.read
    at = state.mesh.at
    names = [tensor.name for tensor in layout.stored_in(at.tp_rank, at.pp_rank)]
    values = ((name, zero.read(name)) for name in names)
    return _copied((name, value if at.dp_rank == 0 else value.new_empty(0)) for name, value in values)


def kind_of(optimizer: Any) -> str:
    """The name of an optimizer's class; ZeRO's is around one."""
    return type(optimizer.optimizer if is_zero(optimizer) else optimizer).__name__


def _copied(values: Any) -> Reader:
    return {name: value.detach().to("cpu", copy=True) for name, value in values}.__getitem__


def _state_of(name: str, given: Any) -> Any:
    if not hasattr(given, "state_dict"):
        raise CheckpointError(
            "an object that is to be saved has no state", where=f"{name}=", expected="state_dict()", got=type(given).__name__
        )
    return given.state_dict()


def _packed(value: Any, where: str) -> bytes:
    """As ``torch.save`` writes it. What cannot be read back safely is refused now and not after the training."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            "a state holds something that cannot be read back safely",
            where=where,
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
        job.record["files"][OPTIMIZER] = dataclasses.asdict(record_of(staging / OPTIMIZER))
    (staging / RECORD).write_text(json.dumps(job.record, indent=2) + "\n", encoding="utf-8")
    job.layout.with_configs(staging).write(staging / MANIFEST)
    commit(staging, target)


# -- generators


def global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _generators(state: ParallelState) -> dict[str, Any]:
    import numpy

    kind, keys, *rest = numpy.random.get_state(legacy=True)
    assert not isinstance(keys, str)
    found = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, torch.from_numpy(keys.copy()), *rest)}
    if state.mesh.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(state.mesh.device)
    return found
