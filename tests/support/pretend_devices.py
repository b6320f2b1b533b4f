"""Pretend accelerators on a CPU: tensors live in ordinary memory, but say ``sim:N`` and refuse to meet those of another device.

    pretend_devices.install()                # once in a process: afterwards torch has an accelerator ``sim`` with 4 devices
    with count_copies() as copies:
        model(**batch)
    assert copies == {"between": 3, "to": 2, "from": 1}

A Python-only PrivateUse1 backend: its kernels unwrap the tensors, run on the CPU and wrap what comes out. It rests on an
experimental API of torch (``_setup_privateuseone_for_python_backend``): where a new torch changes it, ``install`` fails.
Gradients need ``single_threaded_backward``: the kernels are Python, and autograd's threads for devices have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

NAME = "sim"
NUM_DEVICES = 4
aten = torch.ops.aten

# Copies that cross a device border, by direction: to an accelerator from the CPU, from one, between two.
_COPIES = {"to": 0, "from": 0, "between": 0}
_CURRENT = [0]


@contextmanager
def count_copies() -> Iterator[dict[str, int]]:
    """What is copied over a device border inside the block."""
    before, counted = dict(_COPIES), {}
    yield counted
    counted.update({kind: count - before[kind] for kind, count in _COPIES.items()})


@contextmanager
def single_threaded_backward() -> Iterator[None]:
    with torch.autograd.set_multithreading_enabled(False):
        yield


class _Backend(_DummyBackendModule):
    """What torch asks a device module."""

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return _CURRENT[0]

    def set_device(self, device: Any) -> None:
        _CURRENT[0] = device if isinstance(device, int) else torch.device(device).index or 0

    def synchronize(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None: ...

    def memory_allocated(self, device: Any = None) -> int:
        return 0


class _Hook(_DummyPrivateUse1Hook):
    def device_count(self) -> int:
        return NUM_DEVICES

    def get_current_device(self) -> int:
        return _CURRENT[0]

    def set_current_device(self, index: int) -> None:
        _CURRENT[0] = index


class SimTensor(torch.Tensor):
    """A CPU tensor that claims to lie on another device."""

    _inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> SimTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
            requires_grad=False,
        )
        made._inner = inner
        return made

    def __init__(self, inner: Tensor, device: torch.device) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimTensor({self._inner}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SimTensor:
        if id(self) not in memo:
            copied = SimTensor(self._inner.clone(), self.device)
            made = torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied
            memo[id(self)] = made
        return memo[id(self)]

    def tolist(self) -> Any:
        return self._inner.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert a tensor on {self.device} to numpy")

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is aten._to_copy.default:
            return _to_copy(args[0], **kwargs)
        if func is aten.copy_.default:
            _count(args[1].device, args[0].device)
            _inner(args[0]).copy_(_inner(args[1]))
            return args[0]
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default):
            return func(*tree_map(_inner, args))
        if func is aten.histc.default and not args[0].is_floating_point():  # accelerators count integers, the CPU does not
            return _run(func, (args[0].float(), *args[1:]), kwargs).to(args[0].dtype)
        return _run(func, args, kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Any other operation: all tensors on one device (scalars of the CPU may join), and so is the result."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = {tensor.device for tensor in tensors if isinstance(tensor, SimTensor)}
    others = [tensor for tensor in tensors if not isinstance(tensor, SimTensor)]
    if len(devices) > 1 or any(tensor.dim() > 0 for tensor in others):
        found = sorted(map(str, devices | {tensor.device for tensor in others}))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {func}")
    device = next(iter(devices), torch.device(NAME, _CURRENT[0]))
    if kwargs.get("device") is not None:
        device, kwargs["device"] = _with_index(kwargs["device"]), torch.device("cpu")
    result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    given = {id(_inner(tensor)): tensor for tensor in tensors if isinstance(tensor, SimTensor)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in given:  # in place: the tensor that came is the one that goes
            return given[id(value)]
        return value if device.type == "cpu" else SimTensor(value, device)

    return tree_map(wrap, result)


def _to_copy(source: Tensor, **kwargs: Any) -> Tensor:
    target = _with_index(kwargs.pop("device", None) or source.device)
    plain = {name: value for name, value in kwargs.items() if name not in ("pin_memory", "non_blocking")}
    copied = aten._to_copy.default(_inner(source), **plain)
    _count(source.device, target)
    return copied if target.type == "cpu" else SimTensor(copied, target)


def _inner(value: Any) -> Any:
    return value._inner if isinstance(value, SimTensor) else value


def _with_index(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device(NAME, _CURRENT[0]) if device.type == NAME and device.index is None else device


def _count(source: torch.device, target: torch.device) -> None:
    if source != target:
        kind = "to" if source.type == "cpu" else "from" if target.type == "cpu" else "between"
        _COPIES[kind] += 1


@cache
def install() -> Any:
    """Give torch the pretend accelerator; for the rest of the process. Returns what must stay alive."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend(), hook=_Hook())
    library = torch.library.Library("aten", "IMPL")

    def factory(operation: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            device = _with_index(kwargs.pop("device", None) or NAME)
            kwargs.pop("pin_memory", None)
            return SimTensor(operation(*args, **kwargs, device="cpu"), device)

        return make

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        _count(source.device, target.device)
        _inner(target).copy_(_inner(source))
        return target

    library.impl("empty.memory_format", factory(aten.empty.memory_format), "PrivateUse1")
    library.impl("empty_strided", factory(aten.empty_strided.default), "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    return library
