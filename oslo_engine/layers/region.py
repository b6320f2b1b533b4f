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
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.comm.collectives import Axis, copy_to, gather_from, gather_to, reduce_from, reduce_scatter_from, split_to
from oslo_engine.comm.random import RandomStreams
from oslo_engine.errors import BatchError
from oslo_engine.layers.deferred import conv1d, linear
from oslo_engine.layers.specialize import specialize

_SEQUENCE = 1  # dimension of [batch, sequence, hidden]


class Entry:
    """Forward pre-hook of a scope.

    Args:
        axis: tp.
        streams: the rank's random streams.
        inputs: (name, position) of the arguments that carry replicated activations. The first one carries the hidden states,
            which are split along the sequence under sequence parallelism.
        sequence_parallel: whether they are.
    """

    def __init__(self, axis: Axis, streams: RandomStreams, inputs: Sequence[tuple[str, int]], sequence_parallel: bool) -> None:
        self.axis, self.streams, self.inputs, self.sequence_parallel = axis, streams, tuple(inputs), sequence_parallel

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entered, named = list(args), dict(kwargs)
        for index, (name, position) in enumerate(self.inputs):
            split = index == 0 and self.sequence_parallel and torch.is_grad_enabled()
            if isinstance(named.get(name), Tensor):
                named[name] = self._enter(named[name], split)
            elif position < len(entered) and isinstance(entered[position], Tensor):
                entered[position] = self._enter(entered[position], split)
        if module.training:
            self.streams.enter_sharded()
        return tuple(entered), named

    def _enter(self, x: Tensor, split: bool) -> Tensor:
        return gather_to(x, self.axis, _SEQUENCE) if split else copy_to(x, self.axis)


def enter_region(
    scope: nn.Module, axis: Axis, streams: RandomStreams, inputs: Sequence[str], *, sequence_parallel: bool = False
) -> None:
    """Make ``inputs`` of a scope pass through copy_to.

    Raises:
        KeyError: its forward has no argument of that name.

    Communication: backward one all-reduce of each input on tp.
    """
    names = [name for name in inspect.signature(type(scope).forward).parameters if name != "self"]
    for name in inputs:
        if name not in names:
            raise KeyError(name)
    entry = Entry(axis, streams, [(name, names.index(name)) for name in inputs], sequence_parallel)
    scope.register_forward_pre_hook(entry, with_kwargs=True)


class _Row:
    """A linear layer that holds some of the input features: partial products are summed, the bias is added once."""

    _axis: Axis
    _streams: RandomStreams
    _sequence_parallel: bool
    bias: Tensor | None
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self._product(x)
        if self._sequence_parallel and torch.is_grad_enabled():
            y = reduce_scatter_from(y, self._axis, _SEQUENCE)
        else:
            y = reduce_from(y, self._axis)
        self._streams.leave_sharded()
        return y if self.bias is None else y + self.bias

    def _product(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _RowLinear(_Row):
    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, None)


class _RowConv1D(_Row):
    def _product(self, x: Tensor) -> Tensor:
        return conv1d(x, self.weight, None)


def row_parallel(module: nn.Module, axis: Axis, streams: RandomStreams, *, sequence_parallel: bool = False) -> nn.Module:
    """Turn a Linear or Conv1D whose weight is cut along its input features into a row-parallel one (in place).

    Communication: forward one all-reduce of the output on tp (a reduce-scatter under sequence parallelism).
    """
    mixin = _RowLinear if isinstance(module, nn.Linear) else _RowConv1D
    return specialize(module, mixin, _axis=axis, _streams=streams, _sequence_parallel=sequence_parallel)


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
