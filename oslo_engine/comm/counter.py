"""Counts the collectives that run inside a ``with`` block: how many of each kind, and how many bytes this rank puts in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_NOT_TRAFFIC = ("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")
_INPUT_ARGUMENTS = ("input_tensors", "input_tensor", "inputs", "input_list", "input", "tensors", "tensor", "self")


class CollectiveCounter(TorchDispatchMode):
    """Count collectives, forward and backward, of this rank.

        with CollectiveCounter() as count:
            loss = model(**batch).loss
            loss.backward()
        assert count.calls == {"allreduce": [8, 524288]}

    ``calls`` maps the kind ("allreduce", "allgather", "reduce_scatter", "broadcast", "send", "recv", ...) to
    ``[calls, bytes]``. Bytes are the size of what the rank hands in (for ``recv`` what it takes out), whatever algorithm
    carries it. Collectives over a group of one rank are counted like any other. Barriers are not counted.

    Communication: none of its own. It slows every operation inside the block: never leave it on while timing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[int]] = {}

    @property
    def num_calls(self) -> int:
        return sum(calls for calls, _ in self.calls.values())

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.calls.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _NAMESPACES:
            self._count(func, args, kwargs)
        return func(*args, **kwargs)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name.split("::")[1]
        if name in _NOT_TRAFFIC:
            return
        entry = self.calls.setdefault(_kind(name), [0, 0])
        entry[0] += 1
        entry[1] += sum(tensor.numel() * tensor.element_size() for tensor in _tensors(_handed_in(func, args, kwargs)))


def _kind(name: str) -> str:
    """``allreduce_``, ``all_reduce`` -> ``allreduce``; ``_allgather_base_``, ``all_gather_into_tensor`` -> ``allgather``."""
    plain = (
        name.strip("_").replace("all_reduce", "allreduce").replace("all_gather", "allgather").replace("all_to_all", "alltoall")
    )
    for suffix in ("_into_tensor", "_tensor", "_single", "_out", "_base", "_coalesced"):
        plain = plain.replace(suffix, "")
    return plain


def _handed_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    by_name = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return next(by_name[name] for name in _INPUT_ARGUMENTS if name in by_name)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
