"""The maps "balanced" and "auto": what each part costs, and what each device has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from oslo_engine.errors import PlanError
from oslo_engine.footprint.workload import Workload, parse_bytes
from oslo_engine.placement.activations import measure_activations
from oslo_engine.placement.assignment import Part
from oslo_engine.placement.balance import balanced_map
from oslo_engine.placement.devices import accelerators, find_device
from oslo_engine.placement.stacks import Stack

MADE = ("balanced", "auto")
_KEPT_FREE = 0.05  # of a device's memory: for the allocator's gaps and the libraries' own


def make_map(
    model: PreTrainedModel,
    stacks: Sequence[Stack],
    kind: str,
    max_memory: Mapping[Any, int | str] | None,
    workload: Workload | None,
) -> dict[str, torch.device]:
    """The device of every block.

    Args:
        kind: "balanced" fills all devices alike, "auto" as few as suffice.
        max_memory: the devices, in order, and what may be used of each; by default all accelerators with what they have.
        workload: what the model is to do; by default to train if it is in training mode.

    Raises:
        PlanError: another kind, no device, sizes that are none, or the model does not fit.
    """
    if kind not in MADE:
        raise PlanError("there is no such device map", expected=f"a dict, or {' or '.join(map(repr, MADE))}", got=repr(kind))
    workload = workload or Workload(task="train" if model.training else "inference")

    activations = measure_activations(model, stacks, workload)

    def cost(part: Part) -> float:
        return float(resident_bytes(model, part, workload) + activations.of_block.get(part.path, 0))

    return balanced_map(model, stacks, _capacities(max_memory), cost, fewest=kind == "auto", passing=activations.passing)


def resident_bytes(model: PreTrainedModel, part: Part, workload: Workload) -> int:
    """Weights, buffers, and in training gradients and optimizer state of a part; a tied tensor counts once within it."""
    module = model.get_submodule(part.path)
    total = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers(recurse=part.is_block))
    for parameter in module.parameters(recurse=part.is_block):
        size = parameter.numel() * parameter.element_size()
        total += size
        if workload.trains and parameter.requires_grad:
            total += size + workload.optimizer_bytes(tuple(parameter.shape), parameter.element_size())
    return total


def _capacities(max_memory: Mapping[Any, int | str] | None) -> dict[torch.device, float]:
    if max_memory is None:
        found = {device: _memory_of(device) for device in accelerators()}
    else:
        found = {find_device(named): float(parse_bytes(size, f"max_memory[{named!r}]")) for named, size in max_memory.items()}
    if not found:
        raise PlanError(
            "there is no device to place the model on",
            expected="an accelerator, or max_memory that names devices",
            got="none" if max_memory is None else repr(max_memory),
        )
    return found


def _memory_of(device: torch.device) -> float:
    """Free bytes; infinite where the device does not say."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free * (1 - _KEPT_FREE)
