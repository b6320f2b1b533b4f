"""The two ends of a tensor-parallel region: the scope that replicated activations enter, the row layers they leave through.

    hidden (replicated) -> copy_to -> column layers (each rank its heads) -> ... -> row layer -> reduce_from -> hidden
    (replicated)

Between the ends everything random is drawn from this rank's own stream. Column layers are the model's own modules with fewer
rows.

With sequence parallelism the hidden states between regions are split along the sequence: the entry gathers them, the row layer
sums and scatters. That is for training only: without gradients (evaluation, decoding one token) everything is replicated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_engine.comm.collectives import Axis, copy_to, gather_from, gather_to, reduce_from, reduce_scatter_from, split_to
from oslo_engine.comm.random import RandomStreams
from oslo_engine.errors import BatchError, PlanError
from oslo_engine.layers.deferred import conv1d, linear
from oslo_engine.layers.specialize import original_class, specialize

# (axis, all arguments by name, the argument) -> what this rank gets of it.
Change = Callable[[Axis, Mapping[str, Any], Tensor], Tensor]

_SEQUENCE = 1  # dimension of [batch, sequence, hidden]


class Entry:
    """Forward pre-hook of a scope.

    Args:
        axis: tp.
        streams: the rank's random streams.
        names: of the positional arguments, in order.
        inputs: the arguments that carry replicated activations. The first one carries the hidden states, which are split along
            the sequence under sequence parallelism.
        changes: (argument, change) of those of which this rank takes its part, in order.
        sequence_parallel: whether the hidden states are split.
    """

    def __init__(
        self,
        axis: Axis,
        streams: RandomStreams,
        names: Sequence[str],
        inputs: Sequence[str],
        changes: Sequence[tuple[str, Change]],
        sequence_parallel: bool,
    ) -> None:
        self.axis, self.streams, self.sequence_parallel = axis, streams, sequence_parallel
        self.names, self.inputs, self.changes = tuple(names), tuple(inputs), tuple(changes)
        # In no signature, so that a wrong name would go unnoticed.
        self.unsigned = [name for name in (*inputs, *(name for name, _ in changes)) if name not in names]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = dict(zip(self.names, args, strict=False)) | kwargs

        def replace(name: str, change: Callable[[Tensor], Tensor]) -> None:
            if isinstance(named.get(name), Tensor):
                named[name] = change(named[name])

        if missing := [name for name in self.unsigned if name not in named]:
            raise PlanError(
                "the policy names an argument that the scope is not given",
                where=type(module).__name__,
                expected=", ".join(missing),
                got=", ".join(named),
            )
        for index, name in enumerate(self.inputs):
            split = index == 0 and self.sequence_parallel and torch.is_grad_enabled()
            replace(name, self._gather if split else self._copy)
        for name, change in self.changes:
            replace(name, partial(change, self.axis, named))
        if module.training:
            self.streams.enter_sharded()
        given = self.names[: len(args)]
        return (*(named.pop(name) for name in given), *args[len(given) :]), named

    def _gather(self, x: Tensor) -> Tensor:
        return gather_to(x, self.axis, _SEQUENCE)

    def _copy(self, x: Tensor) -> Tensor:
        return copy_to(x, self.axis)


class ColumnEntry:
    """Forward pre-hook of the columns of a region without a scope: those that read one tensor share one gradient sum.

    It can stand before a column and again before a module around it (an adapter).
    """

    def __init__(self, axis: Axis, streams: RandomStreams) -> None:
        self.axis, self.streams = axis, streams
        self.last: tuple[Tensor, Tensor] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if self.last is None and module.training:
            self.streams.enter_sharded()
        if self.last is None or (x is not self.last[0] and x is not self.last[1]):
            self.last = x, copy_to(x, self.axis)
        return (self.last[1], *args[1:])

    def forget(self, *_: Any) -> None:
        """At the end of the region, so that the activations are not kept alive."""
        self.last = None


def enter_region(
    scope: nn.Module,
    axis: Axis,
    streams: RandomStreams,
    inputs: Sequence[str],
    changes: Sequence[tuple[str, Change]] = (),
    *,
    sequence_parallel: bool = False,
) -> None:
    """Make ``inputs`` of a scope pass through copy_to, and take this rank's part of other arguments.

    Args:
        inputs: argument names; none for the first argument.
        changes: (argument name, what becomes of it).

    Raises:
        KeyError: its forward has no argument of that name.

    Communication: backward one all-reduce of each input on tp.
    """
    parameters = [p for name, p in inspect.signature(type(scope).forward).parameters.items() if name != "self"]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind in (p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)

    for name in (*inputs, *(name for name, _ in changes)):
        if name not in names and not takes_any:
            raise KeyError(name)
    entry = Entry(axis, streams, names, inputs or names[:1], changes, sequence_parallel)
    scope.register_forward_pre_hook(entry, with_kwargs=True)


def enter_at_columns(columns: Sequence[nn.Module], rows: Sequence[nn.Module], axis: Axis, streams: RandomStreams) -> None:
    """Make the inputs of the columns pass through copy_to.

    Communication: backward one all-reduce on tp of each tensor that columns read.
    """
    entry = ColumnEntry(axis, streams)
    for column in columns:
        column.register_forward_pre_hook(entry)
    for row in rows:
        row.register_forward_pre_hook(entry.forget)


def leave_at_scope(scope: nn.Module, axis: Axis, streams: RandomStreams) -> None:
    """Sum what the scope returns (the first tensor of it) over the ranks.

    Communication: forward one all-reduce of the output on tp.
    """

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        streams.leave_sharded()
        if isinstance(output, Tensor):
            return reduce_from(output, axis)
        return type(output)((reduce_from(output[0], axis), *output[1:]))

    scope.register_forward_hook(leave)


class RowLayer:
    """A linear layer that holds some of the input features: partial products are summed, the bias is added once."""

    _axis: Axis
    _streams: RandomStreams
    _sequence_parallel: bool
    bias: Tensor | None
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.summed(x)
        return y if self.bias is None else y + self.bias

    def summed(self, x: Tensor) -> Tensor:
        """The output without its bias."""
        y = self._product(x)
        if self._sequence_parallel and torch.is_grad_enabled():
            y = reduce_scatter_from(y, self._axis, _SEQUENCE)
        else:
            y = reduce_from(y, self._axis)
        self._streams.leave_sharded()
        return y

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _RowLinear(RowLayer):
    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, None)


class _RowConv1D(RowLayer):
    def _product(self, x: Tensor) -> Tensor:
        return conv1d(x, self.weight, None)


class InnerLinear(_RowLinear):
    """A row layer inside a region: all ranks go on with its whole output, each towards its own share of the items."""

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_from(self._product(x), self._axis)
        return copy_to(y if self.bias is None else y + self.bias, self._axis)


def row_parallel(module: nn.Module, axis: Axis, streams: RandomStreams, *, sequence_parallel: bool = False) -> nn.Module:
    """Turn a Linear or Conv1D whose weight is cut along its input features into a row-parallel one (in place).

    Raises:
        PlanError: the module's class has a forward of its own.

    Communication: forward one all-reduce of the output on tp (a reduce-scatter under sequence parallelism).
    """
    _check_forward(module)
    mixin = _RowLinear if isinstance(module, nn.Linear) else _RowConv1D
    return specialize(module, mixin, _axis=axis, _streams=streams, _sequence_parallel=sequence_parallel)


def inner_row_parallel(module: nn.Module, axis: Axis) -> nn.Module:
    """The same for a Linear whose whole output the region goes on with.

    Communication: one all-reduce of the output on tp, forward and backward.
    """
    _check_forward(module)
    return specialize(module, InnerLinear, _axis=axis)


def _check_forward(module: nn.Module) -> None:
    cls: Any = original_class(module)
    if cls.forward not in (nn.Linear.forward, Conv1D.forward):
        raise PlanError(
            "a row layer must be an ordinary Linear or Conv1D: this class has a forward of its own",
            where=f"{cls.__module__}.{cls.__qualname__}",
            hint="leave the region out and list its parameters under `replicate`",
        )


class _SequenceBlock:
    """A block under sequence parallelism: hidden states are split before the first of a stack and gathered behind the last."""

    _block_axis: Axis
    _block_streams: RandomStreams
    _block_first: bool
    _block_last: bool
    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self._block_first:
            args, kwargs = self._split(args, kwargs)
        # Each rank has other tokens here, so all the block draws is its own.
        with self._block_streams.block(per_rank=True) if self.training else nullcontext():
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return self._gather(output) if self._block_last else output

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        length, ranks = hidden.shape[_SEQUENCE], self._block_axis.size
        if length % ranks:
            raise BatchError(
                "the sequence length must be a multiple of tp under sequence parallelism",
                expected=f"a multiple of {ranks}",
                got=str(length),
                hint=f"pad the batch (pad_to_multiple_of={ranks})",
            )
        hidden = split_to(hidden, self._block_axis, _SEQUENCE)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def _gather(self, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        whole = gather_from(hidden, self._block_axis, _SEQUENCE, [hidden.shape[_SEQUENCE]] * self._block_axis.size)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole


def sequence_block(block: nn.Module, axis: Axis, streams: RandomStreams, *, first: bool, last: bool) -> nn.Module:
    """Let a block work on its part of the sequence (in place); ``first`` and ``last`` of its stack also split and gather.

    Communication: the first, backward, and the last, forward, one all-gather of the hidden states on tp.
    """
    return specialize(block, _SequenceBlock, _block_axis=axis, _block_streams=streams, _block_first=first, _block_last=last)
