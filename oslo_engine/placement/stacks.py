"""The lists of repeated blocks of a model, by which a device map counts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from oslo_engine.plan.names import Names
from oslo_engine.policy.registry import policies_by_model_type


@dataclass(frozen=True)
class Stack:
    """A list of blocks.

    name: dotted path of the list (``transformer.h``).
    blocks: paths of its blocks, in order.
    main: whether a map that names no list means this one too.
    """

    name: str
    blocks: tuple[str, ...]
    main: bool = True

    def is_called(self, name: str) -> bool:
        """Whether dotted words stand next to each other in the list's path: ``h``, ``encoder``, ``decoder.layers``."""
        return f".{name}." in f".{self.name}."


def find_stacks(model: PreTrainedModel) -> tuple[Stack, ...]:
    """The stacks that the model's policy names, which are its main ones, and every other outermost ``ModuleList``.

    Without a policy all are main.
    """
    from_policy = _of_policy(model)
    inside = {name for stack in from_policy for name in stack.blocks}
    others = [
        Stack(name, blocks, main=not from_policy)
        for name, blocks in _outermost_lists(model)
        if not any(block in inside for block in blocks)
    ]
    order = {name: position for position, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return tuple(sorted((*from_policy, *others), key=lambda stack: order[stack.blocks[0]]))


def _of_policy(model: PreTrainedModel) -> list[Stack]:
    policy = policies_by_model_type().get(model.config.model_type)
    if policy is None:
        return []
    names = Names(model)
    found = [names.from_base(pattern) for pattern in policy.stacks.values()]
    return [Stack(_path_of(blocks), blocks) for blocks in found if blocks]


def _path_of(blocks: tuple[str, ...]) -> str:
    """``encoder.layer.0``, ``encoder.layer.1`` -> ``encoder.layer``."""
    words = [block.split(".") for block in blocks]
    shared = 0
    while all(len(each) > shared + 1 for each in words) and len({each[shared] for each in words}) == 1:
        shared += 1
    path = words[0][:shared]
    return ".".join(path[:-1] if len(blocks) == 1 and path and path[-1].isdigit() else path)


def _outermost_lists(model: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    """(path, paths of the entries) of every ModuleList that is in no other and has parameters."""
    found: list[tuple[str, tuple[str, ...]]] = []

    def visit(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList) and len(child) and any(True for _ in child.parameters()):
                found.append((full, tuple(f"{full}.{number}" for number in range(len(child)))))
            else:
                visit(full, child)

    visit("", model)
    return found
