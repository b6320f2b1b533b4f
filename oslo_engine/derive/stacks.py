"""Where a model's repeated blocks are: the lists of modules that its forward runs through, in the order it runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Stack:
    """pattern: of the names of its blocks, ``layers.*``. blocks: their names in the order of their first calls."""

    pattern: str
    blocks: tuple[str, ...]


def find_stacks(model: PreTrainedModel, run: Callable[[], Any]) -> tuple[Stack, ...]:
    """The stacks that a forward runs, in order.

    Args:
        run: calls the model once.
    """
    order: dict[int, int] = {}
    counts: Counter[int] = Counter()

    def called(module: nn.Module, *_: Any) -> None:
        order.setdefault(id(module), len(order))
        counts[id(module)] += 1

    hooks = [module.register_forward_pre_hook(called) for module in model.modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[str, list[str]] = {}
    _Walk(order, counts, found).into("", model)
    stacks = [
        Stack(pattern, tuple(sorted(blocks, key=lambda name: order[id(model.get_submodule(name))])))
        for pattern, blocks in found.items()
    ]
    return tuple(sorted(stacks, key=lambda stack: order[id(model.get_submodule(stack.blocks[0]))]))


class _Walk:
    def __init__(self, order: dict[int, int], counts: Counter[int], found: dict[str, list[str]]) -> None:
        self.order, self.counts, self.found = order, counts, found

    def into(self, path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            if (isinstance(child, nn.ModuleList) and not self._take(below, child)) or not isinstance(child, nn.ModuleList):
                self.into(below, child)

    def _take(self, path: str, blocks: nn.ModuleList) -> bool:
        run = [(name, block) for name, block in blocks.named_children() if id(block) in self.order and _has_matrix(block)]
        if not run or (len(run) == 1 and (_holds_list(run[0][1], self.order) or self.counts[id(run[0][1])] == 1)):
            return False
        pattern = ".".join("*" if word.isdigit() else word for word in path.split(".")) + ".*"
        self.found.setdefault(pattern, []).extend(f"{path}.{name}" for name, _ in run)
        return True


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters())


def _holds_list(module: nn.Module, order: dict[int, int]) -> bool:
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return any(id(child) in order and _has_matrix(child) for part in lists for child in part)
