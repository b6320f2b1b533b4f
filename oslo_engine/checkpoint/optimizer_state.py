"""An optimizer's state by the names of its parameters: tensors like a parameter are divided as the parameter is.

In a file the entry ``exp_avg`` of ``lm_head.weight`` is ``exp_avg:lm_head.weight``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from oslo_engine.checkpoint.layout import Layout, TensorLayout
from oslo_engine.checkpoint.save import local_tensor
from oslo_engine.errors import CheckpointError, UnsupportedError
from oslo_engine.plan.plan import Plan, TensorPlan
from oslo_engine.rewrite.state import ParallelState

STEM = "optimizer"
MASTER = "fp32"  # the key of a master weight, in single precision, of an optimizer that keeps one


@dataclass(frozen=True)
class Entry:
    """A tensor that an optimizer keeps for a parameter. divided: like the parameter over tp, else the same on all tp ranks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    divided: bool


@dataclass(frozen=True)
class Group:
    """One of an optimizer's parameter groups: names of its parameters on this rank, and its options."""

    parameters: tuple[str, ...]
    options: Mapping[str, Any]


def name_of(key: str, parameter: str) -> str:
    return f"{key}:{parameter}"


def names_of_parameters(model: nn.Module, state: ParallelState) -> dict[Tensor, str]:
    """The first names of this rank's parameters, by identity."""
    return {parameter: state.plan.tensor(name).name for name, parameter in model.named_parameters()}


def parameters_in(optimizer: Any, number: int) -> list[Tensor]:
    """The model's parameters in one of an optimizer's groups. DeepSpeed's own groups have its partitions."""
    members = optimizer.bit16_groups[number] if hasattr(optimizer, "bit16_groups") else optimizer.param_groups[number]["params"]
    return list(members)


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> list[Group]:
    """The groups of an optimizer by names.

    Raises:
        CheckpointError: it has a parameter that the model has not.
    """
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        members = parameters_in(optimizer, number)
        foreign = [parameter for parameter in members if parameter not in names]
        if foreign:
            raise CheckpointError(
                "the optimizer has a parameter that is not the model's",
                where=f"parameter group {number}",
                got=f"a tensor of shape {tuple(foreign[0].shape)}",
                hint="make the optimizer after parallelize or loading, from the parameters of this model; "
                "of DeepSpeed give engine.optimizer",
            )
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append(Group(tuple(names[parameter] for parameter in members), options))
    return groups


def entries_of(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], state: ParallelState
) -> tuple[dict[str, dict[str, Entry]], dict[str, Any]]:
    """What the optimizer keeps on this rank: tensors by parameter and key, and everything else by the name in a file.

    Raises:
        UnsupportedError: it keeps something for a divided parameter that is not divided like it.
    """
    entries: dict[str, dict[str, Entry]] = {}
    others: dict[str, Any] = {}
    for parameter, kept in optimizer.state.items():
        name = names[parameter]
        tensor = state.plan.tensor(name)
        for key, value in kept.items():
            if isinstance(value, Tensor):
                entries.setdefault(name, {})[key] = _entry(name, key, value, parameter, tensor)
            else:
                others[name_of(key, name)] = value
    return entries, others


def _entry(name: str, key: str, value: Tensor, parameter: Tensor, tensor: TensorPlan) -> Entry:
    same = value.shape == parameter.shape
    if tensor.shard is not None and not same and value.ndim:
        raise UnsupportedError(
            "the optimizer keeps something for a divided parameter that cannot be divided like it",
            where=f"{key} of {name}",
            expected=f"shape {tuple(parameter.shape)}, or a number",
            got=f"shape {tuple(value.shape)}",
            hint="an optimizer that works entry by entry (AdamW, SGD) can be saved; factored ones cannot",
        )
    return Entry(value.dtype, tensor.shape if same else tuple(value.shape), same)


def layout_of_entries(plan: Plan, of_ranks: Sequence[Mapping[str, Mapping[str, Entry]]]) -> Layout:
    """The layout of all ranks' entries, in the order of the model.

    Raises:
        CheckpointError: two ranks keep different things for one parameter.
    """
    together: dict[str, dict[str, Entry]] = {}
    for of_rank in of_ranks:
        for name, entries in of_rank.items():
            if together.setdefault(name, dict(entries)) != entries:
                raise CheckpointError("the optimizer keeps different things for one parameter on different ranks", where=name)
    tensors = tuple(
        TensorLayout(
            name=name_of(key, tensor.name),
            aliases=(name_of(key, tensor.name),),
            shape=entry.shape,
            dtype=entry.dtype,
            shard=tensor.shard if entry.divided else None,
            pp_ranks=plan.holders(tensor),
            merged_name=name_of(key, tensor.name),
        )
        for tensor in plan.tensors
        for key, entry in together.get(tensor.name, {}).items()
    )
    at = plan.topology
    return Layout(at.tp, at.pp, plan.policy, plan.model, "safetensors", tensors, stem=STEM)


def values_of(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the optimizer on this rank, by its name in a file. FSDP's are gathered: every rank must take all."""
    for parameter, kept in optimizer.state.items():
        for key, value in kept.items():
            if isinstance(value, Tensor):
                yield name_of(key, names[parameter]), local_tensor(value)


def merge_groups(of_ranks: Sequence[Sequence[Group]]) -> list[Group]:
    """The groups of the whole model. A rank of a pipeline has some of each one's parameters."""
    merged = [Group(group.parameters, group.options) for group in of_ranks[0]]
    for rank, groups in enumerate(of_ranks):
        if len(groups) != len(merged):
            raise CheckpointError(
                "the optimizer has another number of parameter groups on another rank",
                where=f"rank {rank}",
                expected=str(len(merged)),
                got=str(len(groups)),
                hint="make the same groups on every rank; a group may be empty",
            )
        for number, group in enumerate(groups):
            union = dict.fromkeys((*merged[number].parameters, *group.parameters))
            merged[number] = Group(tuple(union), merged[number].options)
    return merged


def fill_groups(optimizer: torch.optim.Optimizer, saved: Sequence[Group], names: Mapping[Tensor, str]) -> None:
    """Give the groups of an optimizer the options that were saved.

    Raises:
        CheckpointError: its parameters are grouped in another way.
    """
    here = groups_of(optimizer, names)
    if len(here) != len(saved):
        raise CheckpointError(
            "the optimizer has another number of parameter groups than the saved one",
            expected=str(len(saved)),
            got=str(len(here)),
        )
    for number, (group, wanted) in enumerate(zip(here, saved, strict=True)):
        foreign = sorted(set(group.parameters) - set(wanted.parameters))
        if foreign:
            raise CheckpointError(
                "a parameter is in another group than when the optimizer was saved",
                where=f"parameter group {number}",
                got=foreign[0],
                hint="make the optimizer's groups by the same rule",
            )
        optimizer.param_groups[number].update(wanted.options)


def put(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, value: Any) -> None:
    """Let the optimizer keep a value for a parameter, on the device where it would have made it."""
    if isinstance(value, Tensor):
        group = next(one for one in optimizer.param_groups if any(parameter is member for member in one["params"]))
        if value.ndim or group.get("capturable") or group.get("fused"):
            value = value.to(parameter.device)
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    optimizer.state[parameter][key] = value
