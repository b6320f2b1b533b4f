"""One run of a block as a graph, asked by gradients what the features that enter its linear layers depend on.

A linear layer that takes the block's activations as they are makes every output of every input, so the graph is cut where one
begins: what a feature depends on through it is whatever anything that enters it depends on. So one gradient for each feature
reaches back to the last linear layers only, and one gradient for each linear layer tells the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_engine.derive.calls import Stop, argument_names, hooked, observed, repeat, repeat_with, tensors_of
from oslo_engine.derive.norms import bypass, find_norms
from oslo_engine.derive.specimen import Specimen

_SMALLEST = 1e-12  # of a tensor's greatest gradient
_AT_ONCE = 8  # gradients: with more the tensors of long recurrences leave the cache


@dataclass(frozen=True)
class Source:
    """Something that features depend on.

    kind: parameter, buffer or argument. name: within the block; of an argument ``module:argument``. dim: of its entries.
    """

    kind: str
    name: str
    dim: int


Tables = dict[Source, Tensor]  # [features, entries], whether a feature depends on an entry
_CUT = "cut"  # kind of the sources that stand for what enters a linear layer: one entry


@dataclass(frozen=True)
class _Cut:
    """Where the graph was cut: the linear layer, what entered it, and the same without its graph."""

    reader: str
    x: Tensor
    leaf: Tensor


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D)) and module.weight.ndim == 2


def out_dim(module: nn.Module) -> int:
    return 1 if isinstance(module, Conv1D) else 0


class Probe:
    """One run of a copy of a block, with everything in it that may matter as a leaf of the graph.

    Args:
        number: of the run, whose weights the specimen must have.
        ends: linear layers whose outputs are to be independent of everything before, in this graph.
    """

    def __init__(self, specimen: Specimen, block: str, number: int, ends: Iterable[str] = ()) -> None:
        self.call = call = specimen.runs[number][block]
        self.block = copy.deepcopy(specimen.block(block))
        self.modules = dict(self.block.named_modules())
        with torch.no_grad(), observed(self.modules) as calls:
            repeat(self.block, call)
        for norm in find_norms(self.modules, calls).values():
            bypass(norm)
        self.inputs: dict[str, Tensor] = {}
        self.arguments: dict[str, Tensor] = {}
        self.cuts: dict[str, _Cut] = {}
        self._uncut: set[str] = set()
        self._kept: list[Tensor] = []
        self._tables: dict[tuple[int, str], Tables | None] = {}
        self._whole: dict[tuple[int, frozenset[str]], Tables] = {}
        self._around: dict[str, bool] = {}
        self.linears = {name: module for name, module in self.modules.items() if is_linear(module) and name in calls}
        self.buffers = {
            name: buffer.requires_grad_()
            for name, buffer in self.block.named_buffers()
            if buffer.is_floating_point() and buffer.ndim
        }
        self._run([name for name in ends if name in self.linears], [name for name in self.modules if name in calls])
        self.rows = tuple(self.inputs)
        self.closable = frozenset(cut.reader for cut in self.cuts.values()) - self._uncut
        self.sources: dict[tuple[str, str], Tensor] = {
            **{("parameter", name): parameter for name, parameter in self.block.named_parameters() if parameter.requires_grad},
            **{("buffer", name): buffer for name, buffer in self.buffers.items()},
            **{("argument", name): tensor for name, tensor in self.arguments.items()},
            **{(_CUT, name): cut.leaf for name, cut in self.cuts.items()},
        }
        self._order = {key: at for at, key in enumerate(self.sources)}

    # -- making the graph

    def _run(self, ends: Collection[str], called: Iterable[str]) -> None:
        outer = {name: self.modules[name] for name in called if any(True for _ in self.modules[name].children())}
        before = [(module, self._keep_arguments(name, module)) for name, module in outer.items()]
        before += [(module, self._keep_input(name, module)) for name, module in self.linears.items()]
        with hooked(*before, after=tuple((self.linears[name], _cut_off) for name in ends)):
            repeat(self.block, self.call, grad=True)

    def _keep_input(self, name: str, linear: nn.Module) -> Any:
        # The activations as they came: where heads or experts have a dimension of their own, not all depends on all.
        shape = next((tensor.shape[:-1] for tensor in tensors_of((self.call.args, self.call.kwargs))), None)
        weight: Any = linear.weight
        mixes = type(linear).forward in (nn.Linear.forward, Conv1D.forward) and bool((weight != 0).all())

        def keep(module: nn.Module, args: Any, kwargs: Any) -> Any:
            x = args[0] if args else next(iter(kwargs.values()))
            if not isinstance(x, Tensor) or not x.requires_grad or x.ndim < 2:
                return None
            self.inputs.setdefault(name, x)
            if not mixes or x.shape[:-1] != shape:
                self._uncut.add(name)
                return None
            cut = _Cut(name, x, x.detach().requires_grad_())
            self.cuts[f"{name} {len(self.cuts)}"] = cut
            return ((cut.leaf, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): cut.leaf})

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

    # -- asking it

    def outer(self, row: str, ends: Collection[str]) -> Tables | None:
        """What the first and the last feature of a row depend on; None if nothing leads there."""
        size = self.inputs[row].shape[-1]
        local = self._asked(row, "outer", [[0], [size - 1]])
        return None if local is None else self.closed(row, local, ends)

    def each(self, row: str) -> Tables:
        """What each feature of a row depends on, up to the last cuts."""
        return self._asked(row, "each", [[feature] for feature in range(self.inputs[row].shape[-1])]) or {}

    def together(self, row: str, groups: list[list[int]]) -> Tables:
        """The same for groups of features: what any of them depends on."""
        return self._asked(row, "together", groups) or {}

    def closed(self, row: str, local: Tables, ends: Collection[str]) -> Tables:
        """With what is behind the cuts; none of it behind the linear layers in ``ends``, nor their own parameters."""
        x = self.inputs[row]
        # Layers that read the same tensor share their tables.
        readers = {f"{name}.weight" for name, read in self.inputs.items() if read is x}
        found = self._through(local, frozenset(ends))
        kept = [source for source in found if source.kind != "parameter" or source.name not in readers]
        return {source: found[source] for source in sorted(kept, key=self._place)}

    def goes_around(self, row: str) -> bool:
        """Whether each feature contains one feature of what entered the block: it was added to what linear layers computed."""
        if row not in self._around:
            self._around[row] = self._goes_around(row)
        return self._around[row]

    def _place(self, source: Source) -> tuple[int, int]:
        return self._order[source.kind, source.name], source.dim

    def _through(self, local: Mapping[Source, Tensor], ends: frozenset[str]) -> Tables:
        own = {f"{end}.{leaf}" for end in ends & self.closable for leaf in ("weight", "bias")}
        found = {
            source: table
            for source, table in local.items()
            if source.kind != _CUT and not (source.kind == "parameter" and source.name in own)
        }
        for source, touched in local.items():
            if source.kind == _CUT and self.cuts[source.name].reader not in ends:
                for other, used in self._everything(self.cuts[source.name].x, ends).items():
                    reached = touched & used
                    found[other] = found[other] | reached if other in found else reached
        return found

    def _everything(self, x: Tensor, ends: frozenset[str]) -> Tables:
        """What anything in a tensor depends on."""
        key = id(x), ends
        if key not in self._whole:
            every = [list(range(x.shape[-1]))]
            self._whole[key] = self._through(self._asked_of(x, "all", every) or {}, ends)
        return self._whole[key]

    def _asked(self, row: str, what: str, groups: list[list[int]]) -> Tables | None:
        return self._asked_of(self.inputs[row], what, groups)

    def _asked_of(self, x: Tensor, what: str, groups: list[list[int]]) -> Tables | None:
        if (key := (id(x), what)) not in self._tables:
            self._tables[key] = self._ask(x, groups)
        return self._tables[key]

    def _ask(self, x: Tensor, groups: list[list[int]]) -> Tables | None:
        """For each group of a tensor's features what it depends on, up to the last cuts; None if nothing leads there."""
        generator = torch.Generator().manual_seed(1)
        direction = torch.randn(x.shape[:-1], generator=generator, dtype=x.dtype)
        weights = torch.rand(x.shape[-1], generator=generator, dtype=x.dtype) + 0.5
        keys, tensors = list(self.sources), list(self.sources.values())
        chunks: list[Tables] = []
        starts = range(0, len(groups), _AT_ONCE)
        for start in starts:
            some = groups[start : start + _AT_ONCE]
            seeds = x.new_zeros(len(some), *x.shape)
            for at, group in enumerate(some):
                seeds[at][..., group] = direction[..., None] * (weights[group] if len(group) > 1 else 1.0)
            try:
                grads = _gradients(x, tensors, seeds)
            except RuntimeError:  # nothing in the block leads here
                return None
            chunks.append({source: used for key, grad in zip(keys, grads, strict=True) for source, used in _tables(key, grad)})
        entries = {source: used.shape[1] for chunk in chunks for source, used in chunk.items()}
        counts = [len(groups[start : start + _AT_ONCE]) for start in starts]

        def rows(source: Source, width: int) -> Tensor:
            empty = [torch.zeros(count, width, dtype=torch.bool) for count in counts]
            return torch.cat([chunk.get(source, none) for chunk, none in zip(chunks, empty, strict=True)])

        return {source: rows(source, width) for source, width in entries.items()}

    def _goes_around(self, row: str) -> bool:
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


def _gradients(x: Tensor, tensors: list[Tensor], seeds: Tensor) -> list[Tensor | None]:
    """Gradients for each seed, [seeds, ...]; all at once where the model's operations allow it."""
    try:
        found = torch.autograd.grad(x, tensors, seeds, retain_graph=True, allow_unused=True, is_grads_batched=True)
        return list(found)
    except RuntimeError:
        single = [torch.autograd.grad(x, tensors, seed, retain_graph=True, allow_unused=True) for seed in seeds]
        return [None if grads[0] is None else torch.stack(grads) for grads in zip(*single, strict=True)]


def _tables(key: tuple[str, str], grad: Tensor | None) -> Iterable[tuple[Source, Tensor]]:
    if grad is None:
        return
    if key[0] == _CUT:
        yield Source(*key, 0), (grad != 0).flatten(1).any(1, keepdim=True)
        return
    for dim, used in _used(grad):
        yield Source(*key, dim), used


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
