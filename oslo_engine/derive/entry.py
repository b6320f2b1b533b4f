"""Where activations enter a region: at a module that holds all of it, or at its columns.

Entering at a module makes all that is uncut inside it partial, and sums the gradients of what goes in. So nothing in it, and
nothing that goes in, may matter to the block's output on another way than through the row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.derive.calls import argument_names, hooked, repeat_with, tensors_of
from oslo_engine.derive.specimen import Specimen


@dataclass(frozen=True)
class Entry:
    """scope: the module, None where activations enter at the columns. inputs: its arguments, if they are not just the first.

    sum: uncut parameters between the columns and the row.
    """

    scope: str | None
    inputs: tuple[str, ...] = ()
    sum: tuple[str, ...] = ()


def common_module(names: Iterable[str]) -> str:
    """The module that all of these lie in."""
    paths = [name.split(".") if name else [] for name in names]
    shared = []
    for words in zip(*paths, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)


def find_entry(
    specimen: Specimen,
    block: str,
    columns: Sequence[str],
    owners: Sequence[str],
    row: str,
    local: Sequence[str],
    needs_scope: bool,
) -> Entry | str:
    """
    Args:
        columns: linear modules that are cut by their outputs.
        owners: all modules that hold something that is cut, but for the row.
        local: arguments that each rank has its own part of already, as ``module:argument``.
        needs_scope: whether arguments are to be cut.

    Returns:
        Where activations enter, or why they cannot.
    """
    paths = _Paths(specimen, block, row)
    inside = common_module(owners)
    candidates = [common_module([*owners, row]), *([inside] if inside not in columns else [])]
    why = ""
    for scope in dict.fromkeys(candidates):
        if scope in paths.called and scope:
            found = paths.through(scope, [name for module, _, name in (one.partition(":") for one in local) if module == scope])
            if isinstance(found, Entry):
                return found
            why = why or found
    if needs_scope:
        return why or "no module takes the arguments that must be cut"
    return paths.at_columns(columns, owners)


def entry_at(
    specimen: Specimen,
    block: str,
    scope: str | None,
    columns: Sequence[str],
    owners: Sequence[str],
    row: str,
    local: Sequence[str],
) -> Entry | str:
    """The same at a place that is given: a module, or None for the columns."""
    paths = _Paths(specimen, block, row)
    if scope is None:
        return paths.at_columns(columns, owners)
    return paths.through(scope, local) if scope in paths.called else f"{scope} is not called"


class _Paths:
    """On which ways things matter to a row, and to the block's output besides."""

    def __init__(self, specimen: Specimen, block: str, row: str) -> None:
        self.block = copy.deepcopy(specimen.block(block))
        self.call, self.row = specimen.runs[0][block], row
        self.modules = dict(self.block.named_modules())
        self.called: set[str] = set()
        hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: self.called.add(name))
            for name, module in self.modules.items()
        ]
        with torch.no_grad():
            repeat_with(self.block, *self.call.fresh())
        for hook in hooks:
            hook.remove()

    def through(self, scope: str, local: Sequence[str]) -> Entry | str:
        module = self.modules[scope]
        names = argument_names(module)
        entered: dict[str, list[Tensor]] = {}
        nested: set[str] = set()

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            def copied(name: str, value: Any) -> Any:
                if isinstance(value, Tensor) and value.requires_grad:
                    value = value * 1.0
                elif tensors_of(value):
                    nested.add(name)
                if tensors := [x for x in tensors_of(value) if x.requires_grad]:
                    entered.setdefault(name, []).extend(tensors)
                return value

            given = tuple(copied(names[at] if at < len(names) else str(at), x) for at, x in enumerate(args))
            return given, {key: copied(key, x) for key, x in kwargs.items()}

        x, output = self._run((module, enter))
        if x is None:
            return "the row is not reached"
        flat = [(name, tensor) for name, tensors in entered.items() for tensor in tensors]
        parameters: list[tuple[str, Tensor]] = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        leads = _reached(x, flat)
        leaks = _reached(output, flat)
        own = self.row.removeprefix(f"{scope}.") if self.row.startswith(f"{scope}.") else None
        if around := [name for name in _reached(output, parameters) if own is None or name.rpartition(".")[0] != own]:
            return f"{scope}: {', '.join(around[:3])} matter behind the row"
        if both := [name for name in leads if name in leaks]:
            return f"{scope}: {', '.join(both)} goes around the row too"
        inputs = tuple(name for name in leads if name not in local)
        if hidden := nested.intersection(inputs):
            return f"{scope}: {', '.join(sorted(hidden))} carries gradients and is no tensor"
        return Entry(scope, () if inputs == names[:1] else inputs)

    def at_columns(self, columns: Sequence[str], owners: Sequence[str]) -> Entry | str:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return (args[0].detach().requires_grad_(), *args[1:]), kwargs

        args_kwargs = self.call.flowing(self.block)
        x, _ = self._run(*((self.modules[name], enter) for name in columns), given=args_kwargs)
        if x is None:
            return "the row is not reached"
        given = [("argument", tensor) for tensor in tensors_of(args_kwargs) if tensor.requires_grad]
        if _reached(x, given):
            return "activations reach the row on another way than through its columns"
        parameters: list[tuple[str, Tensor]] = [(name, p) for name, p in self.block.named_parameters() if p.requires_grad]
        owned = {*owners, self.row}
        between = [name for name in _reached(x, parameters) if name.rpartition(".")[0] not in owned]
        _, output = self._run()
        elsewhere = _reached(output, parameters)
        if both := [name for name in between if name in elsewhere]:
            return f"{', '.join(both[:3])} matter behind the row too"
        if cut := [name for name in elsewhere if name.rpartition(".")[0] in owners]:
            return f"{', '.join(cut[:3])} matter on another way than through the row"
        return Entry(None, (), tuple(between))

    def _run(self, *before: tuple[nn.Module, Any], given: tuple[Any, Any] | None = None) -> tuple[Tensor | None, Tensor]:
        """What enters the row, and the sum of what the block returns when nothing comes through the row."""
        rows: list[Tensor] = []

        def end(module: nn.Module, args: Any, kwargs: Any) -> Any:
            rows.append(args[0])
            return (args[0].detach(), *args[1:]), kwargs

        args, kwargs = given or self.call.flowing(self.block)
        with hooked(*before, (self.modules[self.row], end)):
            output = repeat_with(self.block, args, kwargs)
        hidden = next(iter(tensors_of((args, kwargs))))
        outputs = [tensor for tensor in tensors_of(output) if tensor.shape == hidden.shape and tensor.requires_grad]
        return rows[0] if rows else None, _weighed(outputs, hidden)


def _weighed(tensors: list[Tensor], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    total = like.new_zeros(())
    for tensor in tensors:
        total = total + (tensor * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)).sum()
    return total


def _reached(x: Tensor, named: list[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors that a value depends on."""
    if not x.requires_grad or not named:
        return []
    total = _weighed([x], x) if x.ndim else x
    grads = torch.autograd.grad(total, [tensor for _, tensor in named], retain_graph=True, allow_unused=True)
    found = [name for (name, _), grad in zip(named, grads, strict=True) if grad is not None and bool((grad != 0).any())]
    return list(dict.fromkeys(found))
