"""What each feature that enters a linear layer depends on: entries of parameters, buffers and tensor arguments of its block.

For every feature the gradient is taken with respect to everything in the block; the entries where it is not zero are those the
feature depends on. Weights and lengths differ from run to run, and what is seen in any run counts. Norms pass gradients feature
by feature, so that they do not hide what is separate but for their statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_engine.derive.calls import Stop, argument_names, hooked, observed, repeat, repeat_with, tensors_of
from oslo_engine.derive.norms import bypass, find_norms
from oslo_engine.derive.specimen import Specimen

_SMALLEST = 1e-12  # of a tensor's greatest gradient
_AT_ONCE = 32  # features


@dataclass(frozen=True)
class Source:
    """Something that features depend on.

    kind: parameter, buffer or argument. name: within the block; of an argument ``module:argument``. dim: of its entries.
    """

    kind: str
    name: str
    dim: int


@dataclass
class Dependence:
    """What the features that enter one linear layer depend on.

    row: its name within the block. size: number of features.
    uses: source -> [features, entries], whether a feature depends on an entry; one for each size that an argument had.
    ndims: number of dimensions of each source.
    mixes: whether a feature depends on tokens at other positions.
    """

    row: str
    size: int
    uses: dict[Source, list[Tensor]] = field(default_factory=dict)
    ndims: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, source: Source, table: Tensor, ndim: int) -> None:
        self.ndims[source.kind, source.name] = ndim
        tables = self.uses.setdefault(source, [])
        for known in tables:
            if known.shape == table.shape:
                known |= table
                return
        tables.append(table.clone())


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D)) and module.weight.ndim == 2


def out_dim(module: nn.Module) -> int:
    return 1 if isinstance(module, Conv1D) else 0


def find_dependences(
    specimen: Specimen, block: str, *, ends: Collection[str] = (), skip: Collection[str] = ()
) -> list[Dependence]:
    """Of the linear layers of a block whose features do not all depend on the same.

    Args:
        ends: linear layers whose outputs count as independent of everything before (rows that were found already).
        skip: linear layers not to look at.
    """
    found: dict[str, Dependence] = {}
    dense: set[str] = set()
    for number in range(len(specimen.runs)):
        specimen.use(number)
        probe = _Probe(specimen, block, number, ends)
        for row in probe.rows:
            if row in skip or row in dense:
                continue
            tables = probe.look(row, required=row in found)
            if tables is None:
                if number == 0:
                    dense.add(row)
                continue
            dependence = found.setdefault(row, Dependence(row, probe.inputs[row].shape[-1]))
            for source, table, ndim in tables:
                dependence.add(source, table, ndim)
    specimen.use(0)
    return [dependence for row, dependence in found.items() if row not in dense]


class _Probe:
    """One run of a copy of a block, with everything in it that may matter as a leaf of the graph."""

    def __init__(self, specimen: Specimen, block: str, number: int, ends: Iterable[str]) -> None:
        self.call = call = specimen.runs[number][block]
        self.block = copy.deepcopy(specimen.block(block))
        self.modules = dict(self.block.named_modules())
        with torch.no_grad(), observed(self.modules) as calls:
            repeat(self.block, call)
        for norm in find_norms(self.modules, calls).values():
            bypass(norm)
        self.inputs: dict[str, Tensor] = {}
        self.arguments: dict[str, Tensor] = {}
        self._kept: list[Tensor] = []
        self._looked: dict[tuple[int, bool], list[tuple[Source, Tensor, int]] | None] = {}
        self.linears = linears = {name: module for name, module in self.modules.items() if is_linear(module) and name in calls}
        outer = {
            name: module for name, module in self.modules.items() if name in calls and any(True for _ in module.children())
        }
        self.buffers = {
            name: buffer.requires_grad_()
            for name, buffer in self.block.named_buffers()
            if buffer.is_floating_point() and buffer.ndim
        }
        before = [(module, self._keep_arguments(name, module)) for name, module in outer.items()]
        before += [(module, self._keep_input(name)) for name, module in linears.items()]
        after = tuple((linears[name], _cut_off) for name in ends if name in linears)
        with hooked(*before, after=after):
            repeat(self.block, call, grad=True)
        self.rows = tuple(self.inputs)
        self.sources: dict[tuple[str, str], Tensor] = {
            **{("parameter", name): parameter for name, parameter in self.block.named_parameters() if parameter.requires_grad},
            **{("buffer", name): buffer for name, buffer in self.buffers.items()},
            **{("argument", name): tensor for name, tensor in self.arguments.items()},
        }

    def _keep_input(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            if name not in self.inputs and isinstance(x, Tensor) and x.requires_grad and x.ndim > 1:
                self.inputs[name] = x

        return keep

    def _keep_arguments(self, name: str, module: nn.Module) -> Any:
        names = argument_names(module)

        def take(argument: str, x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point() or not x.ndim:
                return x
            if not x.requires_grad:
                leaf = x.detach().clone().requires_grad_()
                self._kept.append(leaf)
                x = leaf * 1.0
            self.arguments.setdefault(f"{name}:{argument}", x)
            return x

        def keep(module: nn.Module, args: Any, kwargs: Any) -> Any:
            given = tuple(take(names[at] if at < len(names) else str(at), x) for at, x in enumerate(args))
            return given, {key: take(key, x) for key, x in kwargs.items()}

        return keep

    def look(self, row: str, *, required: bool) -> list[tuple[Source, Tensor, int]] | None:
        """Tables of everything the features of a row depend on; None if all depend on all."""
        # Layers that read the same tensor share them.
        x = self.inputs[row]
        if (known := (id(x), required)) not in self._looked:
            readers = {("parameter", f"{name}.weight") for name, read in self.inputs.items() if read is x}
            sources = {key: tensor for key, tensor in self.sources.items() if key not in readers}
            self._looked[known] = self._look(row, x, sources, required)
        return self._looked[known]

    def _look(
        self, row: str, x: Tensor, sources: dict[tuple[str, str], Tensor], required: bool
    ) -> list[tuple[Source, Tensor, int]] | None:
        generator = torch.Generator().manual_seed(1)
        direction = torch.randn(x.shape[:-1], generator=generator, dtype=x.dtype)
        keys, tensors = list(sources), list(sources.values())

        def of(features: range) -> dict[Source, Tensor]:
            """For each source [features, entries], whether they depend on it."""
            seeds = x.new_zeros(len(features), *x.shape)
            for at, feature in enumerate(features):
                seeds[at, ..., feature] = direction
            grads = _gradients(x, tensors, seeds)
            return {
                Source(*key, dim): used
                for key, grad in zip(keys, grads, strict=True)
                if grad is not None
                for dim, used in _used(grad)
            }

        size = x.shape[-1]
        try:
            first, last = of(range(1)), of(range(size - 1, size))
        except RuntimeError:  # nothing in the block leads here
            return None
        if not required:
            apart = [source for source, used in first.items() if self._differ(source, used, last.get(source))]
            if not apart or self._goes_around(row):
                return None
        chunks = [of(range(start, min(start + _AT_ONCE, size))) for start in range(0, size, _AT_ONCE)]
        tables = []
        for source in dict.fromkeys(source for used in chunks for source in used):
            entries = next(used[source].shape[1] for used in chunks if source in used)
            counts = [min(_AT_ONCE, size - start) for start in range(0, size, _AT_ONCE)]
            parts = [
                used.get(source, torch.zeros(count, entries, dtype=torch.bool))
                for used, count in zip(chunks, counts, strict=True)
            ]
            tables.append((source, torch.cat(parts), self.sources[source.kind, source.name].ndim))
        return tables

    def _goes_around(self, row: str) -> bool:
        """Whether each feature contains one feature of what entered the block: it was added to what linear layers computed."""
        inputs: list[Tensor] = []

        def end(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs.append(args[0] if args else next(iter(kwargs.values())))
            raise Stop

        before, after = ((self.modules[row], end),), tuple((linear, _cut_off) for linear in self.linears.values())
        with hooked(*before, after=after):
            args, kwargs = self.call.fresh(grad=True)
            repeat_with(self.block, args, kwargs)
        given = [tensor for tensor in tensors_of((args, kwargs)) if tensor.shape[-1] == inputs[0].shape[-1] and tensor.ndim > 1]
        if not inputs[0].requires_grad or not given:
            return False
        grads = torch.autograd.grad(inputs[0][..., 0].sum(), given, allow_unused=True)
        touched = [dict(_used(grad[None])).get(grad.ndim - 1) for grad in grads if grad is not None]
        return any(features is not None and bool(features[0, 0]) and not bool(features.all()) for features in touched)

    def _differ(self, source: Source, one: Tensor, other: Tensor | None) -> bool:
        if source.kind != "parameter" or self.sources["parameter", source.name].ndim < 2 or other is None:
            return False
        return bool((one & ~other).any() and (other & ~one).any())


def _gradients(x: Tensor, tensors: list[Tensor], seeds: Tensor) -> list[Tensor | None]:
    """Gradients for each seed, [seeds, ...]; all at once where the model's operations allow it."""
    try:
        found = torch.autograd.grad(x, tensors, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True)
        return list(found)
    except RuntimeError:
        single = [torch.autograd.grad(x, tensors, seed, retain_graph=True, allow_unused=True) for seed in seeds]
        return [None if grads[0] is None else torch.stack(grads) for grads in zip(*single, strict=True)]


def _used(grads: Tensor) -> Iterable[tuple[int, Tensor]]:
    """For each dimension with several entries which of them have a gradient, [features, entries]."""
    size = grads.abs()
    greatest = size.flatten(1).amax(1) if size[0].numel() else size.new_zeros(len(size))
    marked = size > _SMALLEST * greatest.view(-1, *[1] * (grads.ndim - 1))
    if not bool(marked.any()):
        return
    for dim in range(1, grads.ndim):
        if grads.shape[dim] > 1:
            yield dim - 1, marked.transpose(1, dim).flatten(2).any(2) if grads.ndim > 2 else marked


def _cut_off(module: nn.Module, args: Any, output: Any) -> Any:
    return output.detach().requires_grad_() * 1.0 if isinstance(output, Tensor) else output
