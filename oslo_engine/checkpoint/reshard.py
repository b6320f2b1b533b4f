"""One process turns any checkpoint into a split one, at any tp and pp, without having it in memory.

The files of the tp ranks are written side by side, tensor by tensor. The layout, the names and the order are those of a save,
so the files are the ones that the ranks themselves would write.
"""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oslo_engine.checkpoint.atomic import MANIFEST, sync
from oslo_engine.checkpoint.checksums import ALGORITHMS, Checksums, FileRecord, record_of
from oslo_engine.checkpoint.complete import check_complete, made_by_class
from oslo_engine.checkpoint.folder import Progress, Verification, check_target, model_of, other_files, replacing
from oslo_engine.checkpoint.initialize import initialize_missing
from oslo_engine.checkpoint.layout import FILE_NAMES, Layout, Serialization, TensorLayout, layout_of
from oslo_engine.checkpoint.merged_names import with_merged_names
from oslo_engine.checkpoint.place import find
from oslo_engine.checkpoint.policy_hash import hash_of_policy, warn_of_another_policy
from oslo_engine.checkpoint.safetensors_io import (
    SafetensorsFile,
    SafetensorsWriter,
    TensorSpec,
    size_of_file,
    write_order,
)
from oslo_engine.checkpoint.source import open_source
from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.checkpoint.stream import Copier, Target, whole_into
from oslo_engine.checkpoint.supply import Supplier, supplies_for
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.errors import UnsupportedError
from oslo_engine.pipeline.orders import rank_of_stage
from oslo_engine.plan.plan import Plan
from oslo_engine.policy.registry import find_policy
from oslo_engine.policy.schema import Policy
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.topology import Coordinate, Topology

PART = ".part"  # of a file's name: its tensors, before torch.save writes them


def reshard(
    source_folder: str | Path,
    out_folder: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    serialization: Serialization = "safetensors",
    policy: Policy | str | Path | None = None,
    expert_split: str = "inner",
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write a checkpoint split at tp and pp. The config and everything else in the folder is copied.

    Args:
        source_folder: a checkpoint in any form that ``open_source`` reads, with its config.
        serialization: "safetensors", or "torch" for ``.bin`` files.
        policy, expert_split: see ``parallelize``.
        overwrite: whether a checkpoint that is there may be replaced.
        dry_run: write nothing.
        progress: is told how far it is.

    Returns:
        The names and sizes of the files, without the manifest; sizes of ``.bin`` files without what torch adds.

    Raises:
        CheckpointError: the source is missing, damaged, or not a checkpoint of the model in its config; or the target has one.
        PolicyError, PlanError: the model cannot be split like this.
    """
    source_folder, out_folder = Path(source_folder), Path(out_folder)
    if serialization not in FILE_NAMES:
        raise UnsupportedError(
            "no such form of files", where="serialization", expected=" or ".join(FILE_NAMES), got=repr(serialization)
        )
    check_target(source_folder, out_folder, overwrite=overwrite)
    source = open_source(source_folder)
    if isinstance(source, SplitSource):
        source.check_configs()
        source.open_all()
    with contextlib.ExitStack() as stack:
        verification = None if dry_run else stack.enter_context(Verification(source))  # while the model is planned, too
        model = model_of(source_folder, source)
        chosen = None if tp == pp == 1 and policy is None else find_policy(policy, model.config.model_type)
        warn_of_another_policy(source, hash_of_policy(chosen))
        plan = _plan(model, chosen, Topology(tp=tp, pp=pp), expert_split)
        values = _Values(source, source_folder, model, plan)
        layout = _layout(source, model, layout_of(plan, values.dtypes, serialization, policy_hash=hash_of_policy(chosen)))
        rest = other_files(source_folder)
        specs = _specs_of(layout)
        if verification is not None:
            num_bytes = sum(map(_bytes_in, specs.values()))
            place = replacing(source_folder, out_folder, verification, num_bytes, progress, overwrite=overwrite)
            staging, written = stack.enter_context(place)
            _write(layout, values, staging, Copier(source, written))
    files = {name: size_of_file(each) if serialization == "safetensors" else _bytes_in(each) for name, each in specs.items()}
    return files | {path.name: path.stat().st_size for path in rest}


def _plan(model: PreTrainedModel, policy: Policy | None, topology: Topology, expert_split: str) -> Plan:
    stages = rank_of_stage("1f1b", topology.pp)
    return plan_model(model, policy, topology, rank_of_stage=stages, expert_split=expert_split).plan


def _layout(source: TensorSource, model: PreTrainedModel, layout: Layout) -> Layout:
    """With the names in a merged checkpoint: as a save finds them, or those that the source has, if it is split alike."""
    ties = {tensor.aliases for tensor in layout.tensors}
    if not isinstance(source, SplitSource) or any(tensor.aliases not in ties for tensor in source.layout.tensors):
        return with_merged_names(layout, model)
    known = {alias: tensor for tensor in source.layout.tensors for alias in tensor.aliases}

    def named(tensor: TensorLayout) -> TensorLayout:
        old = known.get(tensor.name)
        if old is None:  # what the class makes itself
            return dataclasses.replace(tensor, merged_name=None)
        return dataclasses.replace(tensor, merged_name=old.merged_name, converted=old.converted)

    return dataclasses.replace(layout, tensors=tuple(map(named, layout.tensors)))


# -- values


class _Values:
    """The whole tensors of the model, each of which must be in the source.

    Raises:
        CheckpointError: a tensor is missing, too many, or has another shape.
    """

    def __init__(self, source: TensorSource, folder: Path, model: PreTrainedModel, plan: Plan) -> None:
        tensors = [tensor for tensor in plan.tensors if tensor.persistent]
        self._supplies = supplies_for(model, tensors, source)
        made = made_by_class(self._supplies, model)
        check_complete(self._supplies, made, folder, type(model).__name__)
        if not source.native:
            vars(model)["_weight_conversions"] = self._supplies.transforms  # what a merged checkpoint must revert
        if made:
            whole = plan_model(model, None, Topology()).plan
            cpu = torch.device("cpu")
            initialize_missing(type(model), model.config, whole, Coordinate(0, 0, 0), model, made, cpu, model.dtype)
        self._made = {name: find(model, plan.tensor(name)).detach() for name in made}
        self._supplier = Supplier(source, model, {name for supply in self._supplies.of.values() for name in supply.names})
        self.dtypes = {
            tensor.name: self._made[tensor.name].dtype if tensor.name in made else self._supplies.of[tensor.name].dtype
            for tensor in tensors
        }

    def stored(self, name: str) -> str | None:
        """The name under which the source has just this tensor; None if it must be made (see ``make``).

        Raises:
            CheckpointError: tied names have different values.
        """
        return None if name in self._made else self._supplier.stored(self._supplies.of[name])

    def make(self, name: str) -> Tensor:
        return self._made[name] if name in self._made else self._supplier.give(self._supplies.of[name])


# -- files


def _specs_of(layout: Layout) -> dict[str, dict[str, TensorSpec]]:
    """By file: its tensors."""
    return {name: specs for pp_rank in range(layout.pp) for name, specs in _specs_of_stage(layout, pp_rank).items()}


def _specs_of_stage(layout: Layout, pp_rank: int) -> dict[str, dict[str, TensorSpec]]:
    return {
        layout.file_name(tp_rank, pp_rank): {t.name: t.local_spec(tp_rank) for t in layout.stored_in(tp_rank, pp_rank)}
        for tp_rank in range(layout.tp)
    }


def _bytes_in(specs: dict[str, TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs.values())


def _write(layout: Layout, values: _Values, folder: Path, copier: Copier) -> None:
    """All files and the manifest."""
    with contextlib.ExitStack() as opened:
        files: dict[str, Future[Checksums]] = {}
        for pp_rank in range(layout.pp):
            files |= _write_stage(layout, pp_rank, values, folder, copier, opened)
        checksums = {name: finished.result() for name, finished in files.items()}
    if layout.serialization == "safetensors":
        records = {name: of_file.record() for name, of_file in checksums.items()}
    else:
        records = {name: _pickled(folder / (name + PART), folder / name) for name in checksums}
    dataclasses.replace(layout, files=records).with_configs(folder).write(folder / MANIFEST)


def _write_stage(
    layout: Layout, pp_rank: int, values: _Values, folder: Path, copier: Copier, opened: contextlib.ExitStack
) -> dict[str, Future[Checksums]]:
    """The files of all tp ranks of one pp rank, side by side.

    Args:
        opened: what closes them when all are written.
    """
    specs = _specs_of_stage(layout, pp_rank)
    part, algorithms = ("", tuple(ALGORITHMS)) if layout.serialization == "safetensors" else (PART, ())
    tensors = {tensor.name: tensor for tensor in layout.tensors if tensor.pp_ranks[0] == pp_rank}
    writers = [
        opened.enter_context(SafetensorsWriter(folder / (name + part), specs[name], algorithms=algorithms)) for name in specs
    ]
    for name in write_order({tensor.name: tensor.spec for tensor in tensors.values()}):
        targets = _targets(tensors[name], writers)
        stored = values.stored(name)
        if stored is not None:
            copier.copy(stored, targets)
        else:
            copier.copy_whole(values.make(name), targets)
    return {name: writer.finish() for name, writer in zip(specs, writers, strict=True)}


def _targets(tensor: TensorLayout, writers: list[SafetensorsWriter]) -> list[Target]:
    if tensor.shard is None:
        return [whole_into(writers[0], tensor.spec)]
    return [Target(writers[rank], tensor.shard.dim, tensor.shard.spans[rank]) for rank in tensor.tp_ranks_stored()]


def _pickled(part: Path, path: Path) -> FileRecord:
    """The same tensors as ``torch.save`` writes them. It wants them all at once: they are mapped, not read."""
    tensors = SafetensorsFile(part).map()
    torch.save({name: tensors[name] for name in write_order(SafetensorsFile(part).specs)}, path)
    part.unlink()
    sync(path)
    return record_of(path)
