"""A deep model with three blocks of every kind: what its others cost follows from those."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# The first of a kind makes what the others share in the forward, such as masks, the last one what they share in the backward,
# such as the gradient of an encoder's output. Those between are alike.
_KEPT = 3
_PLACES = ("idx", "index", "layer_number", "layer_id")


@dataclass(frozen=True)
class Shortened:
    """stands_for: for every block of the deep model the block of the short one that is like it."""

    model: PreTrainedModel
    stands_for: Mapping[str, str]


def shorten(model: PreTrainedModel, blocks: Sequence[str]) -> Shortened:
    """Leave out, in place, blocks that are like three others of their list.

    Args:
        model: on meta.
        blocks: paths of its blocks; those that stand in no ModuleList of their own stay.
    """
    lists: dict[str, list[str]] = defaultdict(list)
    for block in blocks:
        lists[block.rpartition(".")[0]].append(block)
    stands_for = {block: block for block in blocks}
    for path, members in lists.items():
        container = model.get_submodule(path) if path else model
        if not isinstance(container, nn.ModuleList) or len(container) != len(members) or len(members) <= _KEPT:
            continue
        modules = list(container)
        of_kind: dict[Any, list[int]] = defaultdict(list)
        for number, module in enumerate(modules):
            of_kind[_kind(module)].append(number)
        kept = sorted(number for numbers in of_kind.values() for number in {*numbers[:2], numbers[-1]})
        for numbers in of_kind.values():
            for place, number in enumerate(numbers):
                like = number if place in (0, len(numbers) - 1) else numbers[1]
                stands_for[members[number]] = f"{path}.{kept.index(like)}"
        _replace(model, path, nn.ModuleList([modules[number] for number in kept]))
    return Shortened(model, stands_for)


def _replace(model: nn.Module, path: str, short: nn.ModuleList) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, short)


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Classes, shapes and plain settings of all its modules; not which block it is."""
    return tuple(
        (
            path,
            type(module).__qualname__,
            tuple((name, tuple(tensor.shape)) for name, tensor in module._parameters.items() if tensor is not None),
            tuple(
                (name, value)
                for name, value in sorted(vars(module).items())
                if isinstance(value, (bool, int, float, str)) and not any(word in name for word in _PLACES)
            ),
        )
        for path, module in block.named_modules()
    )
