"""Run a model whose parameters are on ``meta`` on small real activations, without ever allocating a weight.

The parameters cost nothing, the activations are exact where they do not depend on a parameter and zero where they do.
Masks, position ids, routing, cache lengths and everything Python branches on are therefore real, and the data flow is the
model's own.

    real values only         computed: masks, positions, ``.item()`` and ``nonzero`` are exact
    parameters only          computed on meta: ``W.t()`` or ``W[i]`` have a shape and no data
    real and parameters      the shape comes from the meta kernel, the value is zeros
    in place on a real value left as it was when a parameter takes part, for the new value is unknown
    a scalar read from meta  zero

Every function here sees aten operations, so it does not matter which module or composite function issued them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from oslo_engine.rewrite.call_keys import PLAIN, Key, NotPlainError, call_key

aten = torch.ops.aten
META = torch.device("meta")
CPU = torch.device("cpu")

# A result with more elements than this is a gathered weight (the experts' ``W[indices]``), not an activation: it stays on meta.
MAX_REAL_NUMEL = 1 << 23

INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor)
SCALAR_READS = (aten._local_scalar_dense.default, aten.equal.default)
NO_KERNEL = (RuntimeError, NotImplementedError)

Observer = Callable[[list[Tensor], list[Tensor]], None]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and model outputs."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    """Every operation's arguments and results come through here: what is in them nearly always is told apart at once."""
    kind = type(value)
    if isinstance(value, Tensor):
        found.append(value)
    elif kind is tuple or kind is list:
        for child in value:
            _collect(child, found)
    elif kind is dict:
        for child in value.values():
            _collect(child, found)
    elif kind not in PLAIN:
        found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def materialize(value: Any) -> Any:
    """Zeros for a meta tensor that is small enough to exist; anything else unchanged."""
    if not isinstance(value, Tensor) or not value.is_meta or value.numel() > MAX_REAL_NUMEL:
        return value
    return torch.zeros(value.shape, dtype=value.dtype, device=CPU)


def as_meta(value: Any) -> Any:
    """The same tensor without its data."""
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


class MetaWeights(TorchDispatchMode):
    """The rules of the module docstring, for every operation executed while the mode is on.

    ``observe`` is called after every operation with the tensors it took and the tensors it gave. ``num_reads`` counts the
    values that Python read (``item()``, ``bool(t)``), ``num_draws`` the operations that drew random numbers: compare before
    and after.
    """

    def __init__(self) -> None:
        super().__init__()
        self.observe: Observer | None = None
        self.num_reads = 0
        self.num_draws = 0
        self._shapes: dict[Key | None, tuple[Any, list[tuple[torch.Size, torch.dtype]]]] = {}  # of results that recur

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        self.num_reads += func in SCALAR_READS
        self.num_draws += torch.Tag.nondeterministic_seeded in func.tags
        with torch._C.DisableTorchFunction():  # what runs in here is not the model's own code
            out = self._run(func, args, kwargs)
            if self.observe is not None:
                self.observe(tensors_in((args, kwargs)), tensors_in(out))
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        num_meta = sum(t.is_meta for t in tensors)
        if kwargs.get("device") is not None:
            if _only_moves(func, tensors, kwargs):
                return tensors[0]  # x.to(weight.device) hands x through, for where the model runs there is one device
            kwargs["device"] = META if tensors and num_meta == len(tensors) else CPU
        if not num_meta:
            return func(*args, **kwargs)
        if num_meta == len(tensors):
            try:
                return func(*args, **kwargs)
            except NO_KERNEL:
                return self._on_zeros(func, args, kwargs)
        return self._mixed(func, args, kwargs)

    def _mixed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on real values and parameters: its meta kernel says the shape, and does not touch a real value."""
        if func in INDEXING:
            args = _without_masks(args)
        key = _key(func, args, kwargs)
        if key in self._shapes:
            kind, shapes = self._shapes[key]
            zeros = [torch.zeros(shape, dtype=dtype, device=CPU) for shape, dtype in shapes]
            return zeros[0] if kind is None else kind(zeros)
        try:
            out = func(*pytree.tree_map(as_meta, args), **pytree.tree_map(as_meta, kwargs))
        except NO_KERNEL:
            if "grouped_mm" not in str(func):
                return self._on_zeros(func, args, kwargs)
            out = torch.empty(args[0].shape[0], args[1].shape[-1], dtype=args[0].dtype, device=META)
        if func._schema.is_mutable:
            return out
        real = pytree.tree_map(materialize, out)
        kind = type(out) if type(out) in (tuple, list) else None
        leaves = [real] if kind is None else list(real)
        if key is not None and all(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in leaves):
            self._shapes[key] = kind, [(leaf.shape, leaf.dtype) for leaf in leaves]
        return real

    @staticmethod
    def _on_zeros(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation without a meta kernel, or whose shape depends on values: on zeros, if these are small."""
        args, kwargs = pytree.tree_map(materialize, (args, kwargs))
        if any(t.is_meta for t in tensors_in((args, kwargs))):
            raise RuntimeError(f"{func} needs the values of a weight of more than {MAX_REAL_NUMEL} elements")
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        return func(*args, **kwargs)


def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> Key | None:
    """What the shape of a result depends on; None where that cannot be said."""
    try:
        return call_key(func, args, kwargs, lambda tensor: (tensor.shape, tensor.stride(), tensor.dtype), [])
    except NotPlainError:
        return None


def _only_moves(func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether the operation is ``x.to(device)`` and changes nothing else."""
    if func is not aten._to_copy.default or kwargs["device"] == tensors[0].device:
        return False
    return kwargs.get("dtype") in (None, tensors[0].dtype)


def _without_masks(args: Any) -> Any:
    """``W[mask]`` with a real boolean mask as ``W[rows]``: how many rows there are is known here, not to the meta kernel."""
    indices: list[Any] = []
    for index in args[1]:
        is_mask = isinstance(index, Tensor) and index.dtype is torch.bool and not index.is_meta
        indices += index.nonzero().unbind(1) if is_mask else [index]
    return (args[0], indices, *args[2:])


def replace_buffers(model: nn.Module) -> None:
    """Put zeros (ones for whole numbers: models divide by them) in the place of small meta buffers, one per distinct tensor."""
    stand_ins: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                small = materialize(buffer)
                if small is not buffer and not (small.is_floating_point() or small.is_complex() or small.dtype is torch.bool):
                    small = torch.ones_like(small)
                module._buffers[name] = stand_ins.setdefault(id(buffer), small)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back every attribute of every module, hooks and buffers included, whatever the model's forward did to itself."""
    before = [(module, dict(module.__dict__), _copied_dicts(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, dicts in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, entries in dicts.items():
                attributes[name].clear()
                attributes[name].update(entries)


def _copied_dicts(module: nn.Module) -> dict[str, dict[Any, Any]]:
    return {name: dict(value) for name, value in module.__dict__.items() if isinstance(value, dict)}


@contextlib.contextmanager
def without_weights(model: nn.Module) -> Iterator[MetaWeights]:
    """Run ``model`` under ``MetaWeights``. No trace stays in the model, the random state or the grad mode."""
    weights = MetaWeights()
    with (
        unchanged(model),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.no_grad(),
        weights,
    ):
        replace_buffers(model)
        yield weights
