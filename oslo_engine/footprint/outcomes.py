"""What operations on fake tensors gave, so that the same one need not be worked out again.

The blocks of a model run the same operations on the same shapes. ``FakeTensorMode`` remembers results too, but writes down so
much about every argument, and takes so many detours on the way to a result, that a hit costs as much as two real operations.
Here it is the few numbers that a dense tensor's shape depends on. What is not plainly such an operation is not remembered.

Where in its storage a tensor begins is none of these numbers: pieces of one tensor are alike, and of views it is known how far
behind the tensor they begin that they are views of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from oslo_engine.rewrite.call_keys import Key, NotPlainError, call_key

_DEVICE = torch.ops.prim.device.default
_SLICE = torch.ops.aten.slice.Tensor
_ABSOLUTE = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_.default)  # is told where in the storage to begin
_NOT_BY_SHAPE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_UNKNOWN = object()


@dataclass(frozen=True)
class _Made:
    """A tensor that an operation returned.

    of: the argument whose storage it has, as its place among the tensors of the arguments; None: a storage of its own.
    offset: how many elements behind that argument it begins.
    itself: whether it is that argument.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    device: torch.device
    of: int | None
    itself: bool = False


@dataclass(frozen=True)
class _Outcome:
    """kind: None for one tensor, else the sequence they come in."""

    made: tuple[_Made, ...]
    kind: type | None


class Outcomes:
    """A memory of operations; it holds no tensor, so one serves any number of ``FakeTensorMode``s."""

    def __init__(self) -> None:
        self._known: dict[Key, _Outcome | None] = {}  # None: not to be remembered

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What ``func(*args, **kwargs)`` gives under the ``FakeTensorMode`` that is on."""
        if func is _DEVICE:
            return args[0].device
        if func is _SLICE and not kwargs and type(args[0]) is FakeTensor and not torch.is_inference_mode_enabled():
            return _slice(*args)
        tensors: list[Tensor] = []
        try:
            key = call_key(func, args, kwargs, _described, tensors)
        except NotPlainError:
            return func(*args, **kwargs)
        if not tensors or torch.is_inference_mode_enabled():
            return func(*args, **kwargs)
        outcome = self._known.get(key, _UNKNOWN)
        if isinstance(outcome, _Outcome):
            return _again(outcome, tensors)
        out = func(*args, **kwargs)
        if outcome is _UNKNOWN:
            self._known[key] = _outcome(func, out, tensors)
        return out


def _described(tensor: Tensor) -> Key:
    """What a result's shapes depend on."""
    if not isinstance(tensor, FakeTensor) or tensor.constant is not None or tensor.layout is not torch.strided:
        raise NotPlainError
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device


def _outcome(func: Any, out: Any, tensors: Sequence[Tensor]) -> _Outcome | None:
    """None: the result is not a matter of shapes alone."""
    if not torch._library.utils.is_builtin(func) or func in _ABSOLUTE or any(tag in func.tags for tag in _NOT_BY_SHAPE):
        return None
    kind = type(out) if type(out) in (list, tuple) else None
    storages = {tensor.untyped_storage()._cdata: place for place, tensor in reversed(list(enumerate(tensors)))}
    made = []
    own = set()
    for tensor in out if kind else (out,):
        if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.requires_grad or tensor.dtype.is_complex:
            return None
        itself = next((place for place, each in enumerate(tensors) if each is tensor), None)
        of = storages.get(tensor.untyped_storage()._cdata) if itself is None else itself
        offset = int(tensor.storage_offset())
        if of is None:
            own.add(tensor.untyped_storage()._cdata)
            if tensor.untyped_storage().nbytes() != _num_bytes(tensor):
                return None
        elif tensor.dtype != tensors[of].dtype:
            return None  # offsets count elements
        else:
            offset -= int(tensors[of].storage_offset())
        made.append(
            _Made(tuple(tensor.shape), tensor.stride(), tensor.dtype, offset, tensor.fake_device, of, itself is not None)
        )
    new = [each for each in made if each.of is None]
    if len(own) < len(new) or any(each.offset for each in new):
        return None
    return _Outcome(tuple(made), kind)


def _num_bytes(tensor: Tensor) -> int:
    """Of a storage that it just fills."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _again(outcome: _Outcome, tensors: Sequence[Tensor]) -> Any:
    made = [tensors[each.of] if each.itself and each.of is not None else _make(each, tensors) for each in outcome.made]
    return made[0] if outcome.kind is None else outcome.kind(made)


def _slice(tensor: FakeTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> FakeTensor:
    """A loss goes over its rows piece by piece: many slices, each another one."""
    first, stop, _ = slice(start, end, step).indices(tensor.shape[dim])
    shape, stride = list(tensor.shape), list(tensor.stride())
    offset = first * stride[dim]
    shape[dim], stride[dim] = len(range(first, stop, step)), stride[dim] * step
    return _make(_Made(tuple(shape), tuple(stride), tensor.dtype, offset, tensor.fake_device, 0), [tensor])


def _make(each: _Made, tensors: Sequence[Tensor]) -> FakeTensor:
    first = tensors[0]
    assert isinstance(first, FakeTensor)
    mode = first.fake_mode
    with torch._C._DisableTorchDispatch():  # plain tensors on meta, as FakeTensorMode makes them within an operation
        empty = torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device="meta")
        if each.of is not None:
            of = tensors[each.of]
            begin = int(of.storage_offset()) + each.offset
            empty.set_(of.untyped_storage(), begin, each.shape, each.stride)  # type: ignore[call-overload]
    return FakeTensor(mode, empty, each.device)
