"""The tensor class behind ``VocabShard``: the shape of whole logits, the memory of one rank's slice.

Autograd runs through the shard itself, so hooks, ``retain_grad``, DDP's output handling and ``torch.autograd.grad`` see an
ordinary tensor with a ``grad_fn``; its gradient is again a shard. Every operation leaves the shard (``_Unwrap``), works on the
local slice and comes back (``_Wrap``). What an operation does stands in two tables, which vocab_shard.py fills; what is in
neither is refused. torch.compile breaks its graph here and goes on behind.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from oslo_engine.errors import ShardedLogitsError
from oslo_engine.layers.vocab_layout import VocabLayout

_aten = torch.ops.aten

# Facts about the tensor and autograd's bookkeeping: torch's own answer for the logical shape is right. A leading dot marks a
# property, a trailing = its setter; "grad" and "backward" are also torch.autograd's functions.
_PLAIN = """
    .shape .dtype .device .ndim .layout .itemsize .nbytes .is_leaf .grad_fn .output_nr ._version .retains_grad
    .requires_grad .requires_grad= .grad .grad= ._grad ._base ._backward_hooks ._backward_hooks=
    .is_cuda .is_cpu .is_meta .is_sparse .is_quantized .is_nested .is_mkldnn .is_xpu .is_mps
    size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_signed __len__ __hash__ __dir__
    requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad grad backward
"""
PLAIN = frozenset(_PLAIN.split())


class NeedsWholeVocabulary(Exception):
    """Raised by a handler for arguments it cannot serve from one slice; ``VocabShard`` makes the user's error of it."""


class VocabShard(Tensor):
    """Logits of which this rank holds one slice of the vocabulary. Made by a vocabulary-parallel head, never by hand.

    Shape, dtype and autograd are those of the whole logits. Losses over the vocabulary are computed in parallel; anything that
    would need the other ranks' slices raises ``ShardedLogitsError``. Printing, slicing and arithmetic never communicate.

    ``dtype`` may be wider than the memory: ``logits.float()`` of bf16 logits (every Transformers loss begins with it) only
    notes the wish, and the loss reads the bf16 slice, so that the fp32 copy is never made.
    """

    vocab: VocabLayout
    _local: Tensor  # detached; its dtype may be narrower than self.dtype
    _has_views: bool  # an in-place change would have to reach another shard

    # Called with the arguments of the torch function, self first.
    handlers: ClassVar[dict[str, Callable[..., Any]]] = {}
    # Called with (torch function, args, kwargs): operations that run as they are on the slices.
    local_handlers: ClassVar[dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]] = {}

    @staticmethod
    def __new__(cls, local: Tensor, vocab: VocabLayout, dtype: torch.dtype) -> VocabShard:
        shape = list(local.shape)
        shape[vocab.dim] = vocab.total
        shard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=local.device)
        shard.vocab, shard._local, shard._has_views = vocab, local.detach(), False
        return shard

    @staticmethod
    @torch.compiler.disable
    def wrap(local: Tensor, vocab: VocabLayout, dtype: torch.dtype | None = None) -> VocabShard:
        """Present this rank's slice as whole logits.

        Args:
            local: ``[.., vocab.length, ..]`` with the vocabulary at ``vocab.dim``; part of the autograd graph or not.
            vocab: how the vocabulary is cut.
            dtype: dtype to show, equal to ``local``'s or wider.

        Communication: none, forward and backward. Inverse: ``to_local``.
        """
        return _Wrap.apply(local, vocab, dtype or local.dtype)

    @torch.compiler.disable
    def raw_local(self) -> Tensor:
        """The slice as it lies in memory (perhaps in a narrower dtype than ``self.dtype``), with autograd."""
        return _Unwrap.apply(self)

    def to_local(self) -> Tensor:
        """The slice in ``self.dtype``, with autograd. Communication: none. Inverse: ``wrap``."""
        return self.raw_local().to(self.dtype)

    def view_from(self, local: Tensor, vocab: VocabLayout | None = None) -> VocabShard:
        """Wrap what a view operation made of ``raw_local()``."""
        view = VocabShard.wrap(local, vocab or self.vocab, self.dtype)
        view._has_views = self._has_views = True
        return view

    def assign(self, value: VocabShard) -> VocabShard:
        """Put ``value`` in this shard's place: what an in-place operation does."""
        if self._has_views:
            raise NeedsWholeVocabulary("in place on logits that share memory with a view; write `x = x + ...` instead")
        if value.shape != self.shape or value.dtype != self.dtype:
            raise NeedsWholeVocabulary(f"in place would change {tuple(self.shape)} {self.dtype}")
        return _Assign.apply(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local = torch.Tensor.__repr__(self._local)
        return f"VocabShard(shape={list(self.shape)}, dtype={self.dtype}, dim {self.vocab.dim} = {self.vocab}, local={local})"

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabShard:
        if not self.is_leaf:
            raise RuntimeError("only tensors made by the user can be deep-copied: detach() the logits first")
        copy = VocabShard.wrap(self._local.clone(), self.vocab, self.dtype)
        copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise refusal("pickle", "a slice means nothing to another process", self)

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, _operation(func)
        if name in PLAIN or isinstance(func, torch._ops.OpOverload):  # a dispatch mode hands on what __torch_dispatch__ judges
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        try:
            if name in cls.local_handlers:
                return cls.local_handlers[name](func, args, kwargs)
            if name in cls.handlers:
                return _call(cls.handlers[name], args, kwargs)
        except NeedsWholeVocabulary as why:
            raise refusal(name, str(why), *args, *kwargs.values()) from None
        raise refusal(name, "", *args, *kwargs.values())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Python code is caught above; what arrives here is the autograd engine, or code in C++.
        result = _serve_engine(func, args) if not kwargs or func in _WITH_OPTIONS else None
        if result is None:
            raise refusal(str(func), "reached torch's C++ code", *args)
        return result


_WITH_OPTIONS = (_aten.clone.default, _aten.new_empty_strided.default)  # memory format, dtype: the same as the shard's


def _serve_engine(func: Any, args: tuple[Any, ...]) -> VocabShard | None:
    """What autograd does with gradients by itself: aliases, copies and sums of two alike. None for anything else."""
    shard = next(arg for arg in args if isinstance(arg, VocabShard))
    vocab, dtype = shard.vocab, shard.dtype
    if func in (_aten.detach.default, _aten.alias.default):
        return VocabShard(shard._local, vocab, dtype)
    if func is _aten.clone.default:
        return VocabShard(shard._local.clone(), vocab, dtype)
    if func is _aten.view.default and list(args[1]) == list(shard.shape):
        return VocabShard(shard._local, vocab, dtype)
    if func is _aten.new_empty_strided.default and list(args[1]) == list(shard.shape):
        return VocabShard(torch.empty_like(shard._local), vocab, dtype)
    if func in (_aten.add.Tensor, _aten.add_.Tensor, _aten.copy_.default):
        left, right = (_alike(arg, shard) for arg in args[:2])
        if left is None or right is None:
            return None
        local = right.clone() if func is _aten.copy_.default else left + right
        if func is _aten.add.Tensor:
            return VocabShard(local, vocab, dtype)
        if args[0] is shard:
            shard._local = local
            return shard
    return None


def _alike(grad: Any, shard: VocabShard) -> Tensor | None:
    """The slice of a gradient, sharded or whole, of the shape of ``shard``; None if it is anything else."""
    if not isinstance(grad, Tensor) or grad.shape != shard.shape or getattr(grad, "vocab", shard.vocab) != shard.vocab:
        return None
    return local_gradient(grad, shard.vocab, shard.dtype)


def local_gradient(grad: Tensor, vocab: VocabLayout, dtype: torch.dtype) -> Tensor:
    """This rank's slice of a gradient, which may also come whole, from ``logits.backward(whole_gradient)``."""
    if isinstance(grad, VocabShard):
        return _Unwrap.apply(grad).to(dtype)
    return vocab.narrow(grad).to(dtype)


class _Wrap(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, vocab: VocabLayout, dtype: torch.dtype) -> VocabShard:
        ctx.vocab, ctx.dtype = vocab, local.dtype
        ctx.set_materialize_grads(False)
        return VocabShard(local, vocab, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return None if grad is None else local_gradient(grad, ctx.vocab, ctx.dtype), None, None


class _Unwrap(Function):
    @staticmethod
    def forward(ctx: Any, shard: VocabShard) -> Tensor:
        ctx.vocab, ctx.dtype = shard.vocab, shard.dtype
        ctx.set_materialize_grads(False)
        return shard._local.view_as(shard._local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> VocabShard | None:
        return None if grad is None else _Wrap.apply(grad, ctx.vocab, ctx.dtype)


class _Assign(Function):
    @staticmethod
    def forward(ctx: Any, shard: VocabShard, value: VocabShard) -> VocabShard:
        shard._local = value._local
        ctx.mark_dirty(shard)
        return shard

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def _operation(func: Any) -> str:
    """``softmax``, ``__getitem__``, ``.data`` (reading a property), ``.data=`` (setting it)."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f".{func.__self__.__name__}" + {"__get__": "", "__set__": "=", "__delete__": " del"}[name]
    return name


def _call(handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        inspect.signature(handler).bind(*args, **kwargs)
    except TypeError as error:
        raise NeedsWholeVocabulary(f"these arguments are not supported ({error})") from None
    return handler(*args, **kwargs)


def refusal(operation: str, why: str, *operands: Any) -> ShardedLogitsError:
    """The error for an operation that one slice cannot answer."""
    shard = next((operand for operand in tree_leaves(operands) if isinstance(operand, VocabShard)), None)
    return ShardedLogitsError(
        f"`{operation}` needs the whole vocabulary, but this rank holds a slice of the logits" + (f": {why}" if why else ""),
        where=_caller(),
        got=f"entries {shard.vocab}, shape {tuple(shard.shape)}" if shard is not None else None,
        hint="gather them with oslo.gather_logits(outputs), on every tp rank, or run the model under torch.no_grad()",
    )


def _caller() -> str:
    """file:line of the code that used the logits: the innermost frame outside torch and these layers."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module != "torch" and not module.startswith(("torch.", "oslo_engine.layers.vocab")):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
