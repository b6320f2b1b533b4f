"""Running a model's own constructor and initialisers while only about one whole parameter exists at a time.

Parameters are ``meta`` tensors that stand for real values. Each operation on one is executed on its value, in the order of the
program and so with the same random numbers; but the values used longest ago are reduced to what is to be kept of them.

    whole     the value exists (lately used, or the result of an operation on parameters)
    kept      only what ``keep`` made of it exists; an operation entry by entry can go on with that, others are refused
    gone      nobody wants it: operations that draw random numbers are executed on scratch memory, all others are skipped

A value is found by the storage of the tensor, so that views, ``.data`` and ``detach()`` of a parameter reach it too. Asked for
its device, a stand-in tells the value's: initialisers (``trunc_normal_`` for one) leave ``meta`` tensors alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from oslo_engine.checkpoint.skeleton import META, as_meta
from oslo_engine.errors import UnsupportedError

aten = torch.ops.aten

OPEN_BYTES = 1 << 26
NOTHING = "nothing"

# Operations that are not tagged as pointwise and yet treat every entry by itself.
ENTRY_BY_ENTRY = {
    aten.copy_.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.constant_pad_nd.default,
    aten.index_put_.default,
    aten.index_fill_.int_Scalar,
    aten.masked_fill_.Scalar,
}
# Of the first argument only the shape, type and device count.
SHAPE_ONLY = {
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
}
# These write every entry whatever it was.
OVERWRITING = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}


class Keep(Protocol):
    """What is to be kept of a parameter: the slice of one rank."""

    def cut(self, whole: Tensor) -> Tensor: ...

    def restore(self, kept: Tensor, whole: Tensor) -> None:
        """Write ``kept`` where ``cut`` took it from."""


@dataclass(eq=False)
class _Value:
    """The value of one storage: ``flat`` is all of it, in memory of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int
    flat: Tensor | None
    is_parameter: bool = False
    wanted: bool = True
    keep: Keep | None = None
    kept: Tensor | None = None
    lost: bool = False  # entries outside ``region`` are not what the program made them
    region: Any = None  # ``keep``, NOTHING, or None for all

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left, nor wanted."""
        return self.flat is None and not self.wanted

    @property
    def is_incomplete(self) -> bool:
        return self.lost or (self.flat is None and self.region is not None)

    def is_all_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is this value as it is kept, and no part or transpose of it."""
        return (tensor.shape, tensor.stride(), tensor.storage_offset()) == (self.shape, self.stride, 0)

    def whole(self) -> Tensor:
        assert self.flat is not None
        return torch.as_strided(self.flat, self.shape, self.stride)

    def open(self, *, restore: bool) -> Tensor:
        if self.flat is None:
            self.flat = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            if restore and self.keep is not None and self.kept is not None:
                self.keep.restore(self.kept, self.whole())
            self.lost = restore
        elif not restore:
            self.lost = False
        self.kept = None
        return self.flat

    def close(self) -> None:
        if self.keep is not None and self.flat is not None:
            self.kept = self.keep.cut(self.whole())
        if self.keep is not None or not self.wanted:
            self.flat = None


class ShadowExecution(TorchDispatchMode):
    """While it is on, operations on adopted parameters work as the module docstring says.

    Args:
        open_bytes: how much may exist whole at a time; the parameter used last does in any case.
    """

    def __init__(self, open_bytes: int = OPEN_BYTES) -> None:
        super().__init__()
        self._open_bytes = open_bytes
        self._devices = _TrueDevices(self)
        self._default_device = torch.get_default_device()
        # By the address of the storage, which the weak reference keeps from being used again.
        self._values: dict[int, tuple[StorageWeakRef, _Value]] = {}
        self._results: set[int] = set()  # those of them that are results of operations
        self._refusal: UnsupportedError | None = None
        self._open: list[_Value] = []  # parameters whose whole values exist, the one used last at the end

    def __enter__(self) -> Any:
        self._devices.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._devices.__exit__(*error)
        if self._refusal is not None:  # the program may have caught it, or failed for want of the result
            raise self._refusal

    def adopt(self, parameter: nn.Parameter, *, wanted: bool, keep: Keep | None = None) -> nn.Parameter:
        """A meta parameter that stands for ``parameter``, with its values, or undefined ones if it is on meta itself.

        Args:
            wanted: whether its final value is asked for; ``keep`` says what of it (None: all).
        """
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            value = self._value(parameter)
            if value is None:
                stand_in = as_meta(parameter)
                value = self._add(stand_in, None if parameter.is_meta else parameter.detach())
                parameter = stand_in
            value.shape, value.stride = parameter.shape, parameter.stride()  # it may be a view of a result
            value.is_parameter, value.wanted, value.keep = True, wanted, keep if wanted else None
            value.region = value.keep if wanted else NOTHING
            self._use(value)
            self._close_old()
        return parameter

    def result(self, parameter: Tensor, keep: Keep | None) -> Tensor:
        """The final value of a parameter that was wanted, or what ``keep`` makes of it."""
        value = self._value(parameter)
        assert value is not None
        with _disable_current_modes(), torch.no_grad():
            if value.flat is None:
                assert value.kept is not None
                return value.kept
            whole = torch.as_strided(value.flat, parameter.shape, parameter.stride(), parameter.storage_offset())
            return whole if keep is None else keep.cut(whole)

    # -- executing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # in here a stand-in is what it is
            return self._execute(func, args, dict(kwargs or {}))

    def _execute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("device") == META:  # what Python makes of the 2 in ``stand_in[:3] = 2``
            kwargs["device"] = self._default_device
        values = [(tensor, value) for tensor in _tensors((args, kwargs)) if (value := self._value(tensor)) is not None]
        if not values or _is_view(func) or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        random = torch.Tag.nondeterministic_seeded in func.tags
        targets = [value for tensor in written if (value := self._value(tensor)) is not None]
        if not random and targets and len(targets) == len(written) and all(value.is_gone for value in targets):
            return written[0]
        sources = self._incomplete_sources(func, values, written, targets)
        real_args, real_kwargs = pytree.tree_map(lambda leaf: self._real(leaf, func, written, random), (args, kwargs))
        out = func(*real_args, **real_kwargs)
        self._close_old()
        if written:
            self._spoil(targets, sources)
            return written[0]
        return pytree.tree_map(lambda leaf: self._stand_in(leaf, func, sources), out)

    def _real(self, leaf: Any, func: Any, written: list[Tensor], random: bool) -> Any:
        """The real tensor for a stand-in; other arguments unchanged."""
        value = self._value(leaf) if isinstance(leaf, Tensor) else None
        if value is None:
            return leaf
        target = any(leaf is tensor for tensor in written)
        overwritten = target and (random or func in OVERWRITING) and leaf.numel() == value.numel
        flat = value.open(restore=not overwritten)
        self._use(value)
        return torch.as_strided(flat.view(leaf.dtype), leaf.shape, leaf.stride(), leaf.storage_offset())

    def _incomplete_sources(
        self, func: Any, values: list[tuple[Tensor, _Value]], written: list[Tensor], targets: list[_Value]
    ) -> list[_Value]:
        """What the operation reads of which only a region is right: then its result is right there, if it works entry by entry.

        Raises:
            UnsupportedError: the result would be wrong where it is wanted.
        """
        if func in SHAPE_ONLY or not any(value.is_incomplete for _, value in values):
            return []
        sources = [(t, value) for t, value in values if value.is_incomplete and not any(t is tensor for tensor in written)]
        if sources:
            whole = all(value.is_all_of(t) for t, value in values)
            parameters = {value.region for value in targets if value.is_parameter and value.wanted}
            same_region = len(parameters | {value.region for _, value in sources}) == 1
        else:  # at most a target is incomplete, and stays so
            whole = same_region = True
        by_entry = func in ENTRY_BY_ENTRY or {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded} & set(func.tags)
        if not (by_entry and whole and same_region and len(targets) == len(written)):
            self._refuse(func)
        return [value for _, value in sources]

    def _refuse(self, func: Any) -> None:
        self._refusal = UnsupportedError(
            "an initialiser computes with a whole parameter after others were initialised",
            where=str(func),
            hint="build the model whole and pass it to parallelize",
        )
        raise self._refusal

    @staticmethod
    def _spoil(values: list[_Value], sources: list[_Value]) -> None:
        """Note that values are right only where the sources are."""
        for value in values if sources else ():
            value.lost, value.region = True, sources[0].region

    def _stand_in(self, out: Any, func: Any, sources: list[_Value]) -> Any:
        """A meta tensor for the result of an operation on parameters: code may go on with it, as a ``.data`` for one."""
        if not isinstance(out, Tensor):
            return out
        if sources and out.shape != sources[0].shape:
            self._refuse(func)
        for key in [key for key in self._results if self._values[key][0].expired()]:
            del self._values[key]
            self._results.discard(key)
        out = out.contiguous()
        stand_in = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=META)
        self._spoil([self._add(stand_in, out)], sources)
        self._results.add(stand_in.untyped_storage()._cdata)
        return stand_in

    # -- values

    def _add(self, stand_in: Tensor, real: Tensor | None) -> _Value:
        storage = stand_in.untyped_storage()
        numel = storage.nbytes() // stand_in.dtype.itemsize
        if real is not None and (real.storage_offset() or real.untyped_storage().nbytes() != storage.nbytes()):
            copy = torch.empty(numel, dtype=real.dtype, device=real.device)
            torch.as_strided(copy, stand_in.shape, stand_in.stride()).copy_(real)
            real = copy
        value = _Value(
            stand_in.shape,
            stand_in.stride(),
            stand_in.dtype,
            torch.empty(0).device if real is None else real.device,
            numel,
            None if real is None else torch.as_strided(real, (numel,), (1,)),
        )
        self._values[storage._cdata] = (StorageWeakRef(storage), value)
        return value

    def _value(self, tensor: Tensor) -> _Value | None:
        if not tensor.is_meta:
            return None
        found = self._values.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def _use(self, value: _Value) -> None:
        if value.is_parameter:
            self._open = [*(other for other in self._open if other is not value), value]

    def _close_old(self) -> None:
        while len(self._open) > 1 and sum(value.num_bytes for value in self._open) > self._open_bytes:
            self._open.pop(0).close()


_DEVICE, _IS_META = (vars(torch._C.TensorBase)[name].__get__ for name in ("device", "is_meta"))


class _TrueDevices(TorchFunctionMode):
    """Answers for stand-ins where their values are."""

    def __init__(self, shadow: ShadowExecution) -> None:
        super().__init__()
        self._shadow = shadow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_DEVICE, _IS_META):
            with torch._C.DisableTorchFunction():
                value = self._shadow._value(args[0])
            if value is not None:
                return value.device if func == _DEVICE else False
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_view(func: Any) -> bool:
    return any(argument.alias_info is not None and not argument.alias_info.is_write for argument in func._schema.arguments)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    return written
