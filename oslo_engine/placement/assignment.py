"""From the paths that a map names to a device for every module that holds tensors.

What a map leaves open follows from when it is called. Parts called before the blocks (embeddings) go to the device of the first
block behind them, parts called after them (norms, heads) to that of the last one. Two kinds of parts stay together: those
that share a tensor, and the parts before the blocks of one module, whose results are added up there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from oslo_engine.placement.call_order import call_order
from oslo_engine.placement.device_map import Faults, nearest
from oslo_engine.placement.stacks import Stack


@dataclass(frozen=True)
class Part:
    """A block, or a module outside the blocks that owns tensors: what is placed as a whole.

    owner: path of the nearest module around it that holds blocks. entry: whether it is called before them.
    neighbour: the block whose device it takes by default; None in a model without blocks.
    """

    path: str
    is_block: bool = False
    owner: str = ""
    entry: bool = False
    neighbour: str | None = None


def parts_of(model: PreTrainedModel, stacks: Sequence[Stack]) -> list[Part]:
    """All parts, in the order in which the model registers them."""
    blocks = [block for stack in stacks for block in stack.blocks]
    paths: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        if path in known or any(True for _ in _tensors(module)):
            paths.append(path)
        if path not in known:
            for name, child in module._modules.items():
                if child is not None:
                    visit(f"{path}.{name}" if path else name, child)

    known = set(blocks)
    visit("", model)
    called = call_order(model, paths)
    registered = {path: at for at, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    blocks.sort(key=lambda block: registered[block])
    return [
        Part(path, is_block=True, neighbour=path) if path in known else _outer_part(model, path, blocks, called, registered)
        for path in paths
    ]


def _outer_part(
    model: nn.Module, path: str, blocks: Sequence[str], called: Mapping[str, int], registered: Mapping[str, int]
) -> Part:
    """Where it stands among the blocks of the nearest module around it that has some."""
    owner = path
    while not (inside := [block for block in blocks if not owner or block.startswith(f"{owner}.")]) and owner:
        owner = owner.rpartition(".")[0]
    if not inside:
        return Part(path)
    if path in called and (timed := [block for block in inside if block in called]):
        behind = [block for block in timed if called[block] > called[path]]
    else:
        behind = [block for block in inside if registered[block] > registered[path]]
    has_parameters = any(True for _ in model.get_submodule(path).parameters(recurse=False))
    if behind or path == owner or not has_parameters:  # what a module owns itself is at its entry; buffers are read early
        return Part(path, owner=owner, entry=True, neighbour=(behind or inside)[0])
    return Part(path, owner=owner, neighbour=inside[-1])


def bound_together(model: PreTrainedModel, parts: Sequence[Part]) -> list[list[Part]]:
    """Groups of parts that must lie on one device, each in order, the groups by their first part."""
    number_of = list(range(len(parts)))

    def join(one: int, other: int) -> None:
        kept, dropped = sorted((number_of[one], number_of[other]))
        for index, number in enumerate(number_of):
            if number == dropped:
                number_of[index] = kept

    first_holder: dict[object, int] = {}
    for index, part in enumerate(parts):
        keys: list[object] = [id(tensor) for tensor in _parameters_of(model, part)]
        keys.append(id(model.get_submodule(part.path)))
        if part.entry:
            keys.append(part.owner)
        for key in keys:
            join(first_holder.setdefault(key, index), index)
    groups: dict[int, list[Part]] = {}
    for index, part in enumerate(parts):
        groups.setdefault(number_of[index], []).append(part)
    return list(groups.values())


def assign(
    model: PreTrainedModel, parts: Sequence[Part], placed: Mapping[str, torch.device], faults: Faults
) -> dict[str, torch.device]:
    """The device of every part.

    Args:
        parts: of the model.
        placed: what the map says.
    """
    found: dict[str, torch.device] = {}
    for group in bound_together(model, parts):
        named = {part.path: device for part in group if (device := nearest(placed, part.path)) is not None}
        if len(set(named.values())) > 1:
            said = ", ".join(f"{path or 'the model'} on {device}" for path, device in named.items())
            faults.add(f"these share weights or are added to one another, so they need one device: {said}")
        first = group[0]
        device = next(iter(named.values()), None)
        if device is None and first.neighbour is not None:
            device = nearest(placed, first.neighbour)
        if device is None:
            faults.add(f"{first.path or 'the model itself'} has no device")
            continue
        found.update({part.path: device for part in group})
    return found


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for table in (module._parameters, module._buffers) for tensor in table.values() if tensor is not None]


def _parameters_of(model: nn.Module, part: Part) -> list[nn.Parameter]:
    return list(model.get_submodule(part.path).parameters(recurse=part.is_block))
