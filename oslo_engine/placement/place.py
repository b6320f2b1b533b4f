"""A model on several devices of one process: placing it by a map, and taking it back.

``place`` changes nothing before the whole map is known to fit. It leaves a ``Placement`` on the model, from which ``lift``
restores the devices and the class that the model had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oslo_engine.errors import PlanError, UnsupportedError
from oslo_engine.footprint.workload import Workload
from oslo_engine.placement.assignment import assign, parts_of
from oslo_engine.placement.device_map import DeviceMap, Faults, read_device_map
from oslo_engine.placement.hooks import attach, detach, encoder_of
from oslo_engine.placement.made_map import MADE, make_map
from oslo_engine.placement.moving import move_tensors, part_of
from oslo_engine.placement.stacks import find_stacks

Model = TypeVar("Model", bound=PreTrainedModel)


@dataclass(frozen=True)
class Placement:
    """What placing leaves on a model, as ``model._oslo_placement``.

    device_of: of every part: blocks, and modules outside the blocks that own tensors.
    was_on: the device of every tensor before.
    was_class: the model's class before.
    """

    device_of: Mapping[str, torch.device]
    was_on: Mapping[str, torch.device]
    was_class: type

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(dict.fromkeys(self.device_of.values()))

    def check_move(self, move: Callable[[Tensor], Tensor]) -> None:
        """
        Raises:
            UnsupportedError: ``move`` would take tensors to another device.
        """
        for device in self.devices:
            if (to := move(torch.empty(0, device=device)).device) != device:
                raise UnsupportedError(
                    "moving this model would undo its device map",
                    expected=", ".join(map(str, self.devices)),
                    got=str(to),
                    hint="call model.deparallelize() first; .to(dtype) alone is fine",
                )


class _KeepsOutput:
    """Stands where ``generate`` would put a hook of accelerate's on an encoder to copy its output back."""

    io_same_device = False

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return module


def place(
    model: Model,
    device_map: DeviceMap | str,
    placed_class: type,
    *,
    max_memory: Mapping[Any, int | str] | None = None,
    workload: Workload | None = None,
) -> Model:
    """Put the parts of a model on devices, in place; see ``api.parallelize`` for the forms of a map.

    Args:
        placed_class: the subclass of the model's class that knows it is placed.
        max_memory: for a map that is made here, the devices to use, with the bytes of each; by default all accelerators.
        workload: for a map that is made here, what the model is to do.

    Raises:
        PlanError: the map does not fit, with all that is wrong with it, or none can be made; the model is unchanged.
        UnsupportedError: the model is split over processes, or placed already.
    """
    if "_oslo" in model.__dict__ or "_oslo_placement" in model.__dict__:
        raise UnsupportedError(
            "this model is parallelized already", got=type(model).__name__, hint="call model.deparallelize() before another map"
        )
    if "hf_device_map" in model.__dict__:
        raise UnsupportedError(
            "this model was placed by accelerate",
            got=f"hf_device_map of {len(model.__dict__['hf_device_map'])} entries",
            hint="load it without device_map",
        )
    if any(tensor.is_meta for tensor in model.parameters()):
        raise PlanError("a model without weights has nothing to place", where=type(model).__name__, got="parameters on meta")
    faults = Faults()
    stacks = find_stacks(model)
    if isinstance(device_map, str):
        device_map = make_map(model, stacks, device_map, max_memory, workload)
    elif max_memory is not None or workload is not None:
        raise PlanError(
            "max_memory and workload are for maps that are made here", expected=" or ".join(map(repr, MADE)), got="a map"
        )
    placed = read_device_map(model, device_map, stacks, faults)
    device_of: dict[str, torch.device] = {}
    if not faults.found:
        device_of = assign(model, parts_of(model, stacks), placed, faults)
    faults.raise_any(model)
    was_on = move_tensors(model, lambda name: device_of[part_of(name, device_of)])
    attach(model, device_of, {block for stack in stacks for block in stack.blocks})
    if (encoder := encoder_of(model)) is not None:
        encoder.__dict__["_hf_hook"] = _KeepsOutput()
    model.__dict__["_oslo_placement"] = Placement(device_of, was_on, type(model))
    # Devices, not their names: by this Trainer and accelerate know that the model is not theirs to move, "cpu" or not.
    model.__dict__["hf_device_map"] = dict(device_of)
    model.__class__ = placed_class  # type: ignore[assignment]
    return model


def lift(model: Model) -> Model:
    """Undo ``place``: the tensors, with what they have become, return to the devices they came from.

    Raises:
        PlanError: the model is not placed.
    """
    placement = model.__dict__.get("_oslo_placement")
    if placement is None:
        raise PlanError("this model has no device map", got=type(model).__name__)
    detach(model)
    for module in model.modules():
        if isinstance(vars(module).get("_hf_hook"), _KeepsOutput):
            del module.__dict__["_hf_hook"]
    was_on: Mapping[str, torch.device] = placement.was_on
    move_tensors(model, lambda name: was_on[name])
    for name in ("_oslo_placement", "hf_device_map"):
        del model.__dict__[name]
    model.__class__ = placement.was_class
    return model


def placement_of(model: Any) -> Placement | None:
    """None for a model without a device map."""
    found: Placement | None = model.__dict__.get("_oslo_placement")
    return found
