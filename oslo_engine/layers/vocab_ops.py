"""Operations on vocabulary-sharded logits that need no communication: shapes, indices, dtypes, entry by entry arithmetic.

Shape operations work on the slice as it lies in memory (``raw_local``), so that a widened dtype stays a note; arithmetic works
in the dtype shown (``to_local``). A replicated tensor that meets a shard passes through ``copy_to``: each rank uses it for its
own entries, so its gradient is the sum over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from oslo_engine.comm.collectives import copy_to
from oslo_engine.layers.vocab_layout import VocabLayout
from oslo_engine.layers.vocab_tensor import NeedsWholeVocabulary, VocabShard

_ELEMENTWISE = """
    neg abs exp log tanh sigmoid relu clamp clamp_min clamp_max nan_to_num isnan isinf isfinite zeros_like ones_like full_like
    add sub subtract mul multiply div divide true_divide pow rsub maximum minimum where masked_fill
    eq ne lt le gt ge logical_and logical_or logical_not
    __neg__ __add__ __sub__ __mul__ __truediv__ __pow__ __radd__ __rsub__ __rmul__ __rdiv__ __rtruediv__ __rpow__
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __invert__
"""
_REARRANGING = """
    .T .mT transpose swapaxes swapdims permute movedim moveaxis squeeze unsqueeze select narrow index_select split chunk unbind
"""
ELEMENTWISE = tuple(_ELEMENTWISE.split())
REARRANGING = tuple(_REARRANGING.split())
IN_PLACE: dict[str, Any] = {
    **{f"{name}_": getattr(torch.Tensor, name) for name in ("add", "sub", "mul", "div", "masked_fill", "tanh", "clamp", "neg")},
    "__iadd__": torch.Tensor.add,
    "__isub__": torch.Tensor.sub,
    "__imul__": torch.Tensor.mul,
    "__itruediv__": torch.Tensor.div,
}


def first_shard(*values: Any) -> VocabShard:
    return next(leaf for leaf in tree_leaves(values) if isinstance(leaf, VocabShard))


def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> VocabShard:
    """Run an entry by entry operation on the slices.

    Communication: backward one all-reduce of each replicated operand that has a gradient.
    """
    if kwargs.get("out") is not None:
        raise NeedsWholeVocabulary("`out=` is not supported")
    vocab = first_shard(args, kwargs).vocab
    local_args, local_kwargs = tree_map(lambda operand: _operand(operand, vocab), (args, kwargs))
    return VocabShard.wrap(func(*local_args, **local_kwargs), vocab)


def _operand(operand: Any, vocab: VocabLayout) -> Any:
    if isinstance(operand, VocabShard):
        if operand.vocab != vocab:
            raise NeedsWholeVocabulary(
                f"the operands are cut differently ({vocab}, dim {vocab.dim}; {operand.vocab}, dim {operand.vocab.dim})"
            )
        return operand.to_local()
    if not isinstance(operand, Tensor):
        return operand
    operand = copy_to(operand, vocab.axis)
    if operand.ndim < -vocab.dim or operand.shape[vocab.dim] == 1:
        return operand
    if operand.shape[vocab.dim] != vocab.total:
        raise NeedsWholeVocabulary(
            f"a tensor of shape {tuple(operand.shape)} does not fit a vocabulary of {vocab.total} in dim {vocab.dim}"
        )
    return vocab.narrow(operand)


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> VocabShard:
    """``logits *= scale``: compute a new slice and put it in the old one's place."""
    shard = args[0]
    if not isinstance(shard, VocabShard):
        raise NeedsWholeVocabulary("in place on a whole tensor")
    return shard.assign(elementwise(IN_PLACE[func.__name__], args, kwargs))


def rearrange(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that moves, drops or picks whole dimensions, and find out where the vocabulary went.

    The operation is tried on shapes alone, with a vocabulary of V and of V + 1: the one dimension in which the results differ
    is the vocabulary. Where there is none, or more, the operation cut the vocabulary.
    """
    shard = args[0]
    if not isinstance(shard, VocabShard):
        raise NeedsWholeVocabulary("the logits are not the first argument")
    results = [_on_shapes(func, shard, extra, args[1:], kwargs) for extra in (0, 1)]
    shapes = [[part.shape for part in _listed(result)] for result in results]
    if len(shapes[0]) != len(shapes[1]):
        raise NeedsWholeVocabulary("it cuts the vocabulary dimension")
    dims = [_vocabulary_dim(one, two) for one, two in zip(*shapes, strict=True)]
    locals_ = _listed(func(shard.raw_local(), *args[1:], **kwargs))
    views = tuple(shard.view_from(local, shard.vocab.at_dim(dim)) for local, dim in zip(locals_, dims, strict=True))
    return views[0] if isinstance(results[0], Tensor) else views


def _on_shapes(func: Any, shard: VocabShard, extra: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = list(shard.shape)
    shape[shard.vocab.dim] += extra
    args, kwargs = tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, (args, kwargs))
    try:
        return func(torch.empty(shape, device="meta"), *args, **kwargs)
    except RuntimeError as error:
        raise NeedsWholeVocabulary(str(error)) from None


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _vocabulary_dim(one: Sequence[int], two: Sequence[int]) -> int:
    changed = [dim for dim, sizes in enumerate(zip(one, two, strict=True)) if sizes[0] != sizes[1]]
    if len(changed) != 1:
        raise NeedsWholeVocabulary("it cuts the vocabulary dimension")
    return changed[0] - len(one)


def iterate(shard: VocabShard) -> Iterator[VocabShard]:
    return iter(rearrange(torch.Tensor.unbind, (shard, 0), {}))


def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> VocabShard:
    """``torch.cat`` and ``torch.stack`` of shards that are cut alike, along another dimension."""
    tensors, stacking = args[0] if args else kwargs["tensors"], func.__name__ == "stack"
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    vocab, ndim = first_shard(tensors).vocab, first_shard(tensors).ndim
    if not all(isinstance(tensor, VocabShard) and tensor.vocab == vocab for tensor in tensors):
        raise NeedsWholeVocabulary("only shards that are cut alike can be joined")
    if stacking:
        position = dim % (ndim + 1)  # of the new dimension
        vocab = vocab.at_dim(vocab.dim - 1) if position > ndim + vocab.dim else vocab
    elif dim % ndim == ndim + vocab.dim:
        raise NeedsWholeVocabulary("joining along the vocabulary")
    return VocabShard.wrap(func([tensor.to_local() for tensor in tensors], dim), vocab)


def reshape(shard: VocabShard, *shape: Any, size: Any = None) -> VocabShard:
    """``view``, ``reshape``: any new shape that leaves the vocabulary, and what lies behind it, as it is."""
    target = size if size is not None else shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if not isinstance(shard, VocabShard) or not all(isinstance(length, int) for length in target):
        raise NeedsWholeVocabulary("only a new shape is supported")
    return _reshape_to(shard, list(target))


def reshape_as(shard: VocabShard, other: Tensor) -> VocabShard:
    if not isinstance(shard, VocabShard):
        raise NeedsWholeVocabulary("a whole tensor in the shape of a shard")
    return _reshape_to(shard, list(other.shape))


def flatten(shard: VocabShard, start_dim: int = 0, end_dim: int = -1) -> VocabShard:
    start, end = start_dim % shard.ndim, end_dim % shard.ndim
    return _reshape_to(shard, [*shard.shape[:start], -1, *shard.shape[end + 1 :]])


def _reshape_to(shard: VocabShard, target: list[int]) -> VocabShard:
    vocab = shard.vocab
    if target.count(-1) == 1:
        known = math.prod(length for length in target if length != -1)
        target[target.index(-1)] = shard.numel() // max(known, 1)
    if math.prod(target) != shard.numel() or target[vocab.dim :] != list(shard.shape[vocab.dim :]):
        raise NeedsWholeVocabulary(f"{tuple(shard.shape)} -> {tuple(target)} mixes the vocabulary with other dimensions")
    target[vocab.dim] = vocab.length
    return shard.view_from(shard.raw_local().reshape(target))


def contiguous(shard: VocabShard, memory_format: torch.memory_format = torch.contiguous_format) -> VocabShard:
    if shard._local.is_contiguous(memory_format=memory_format):
        return shard
    return VocabShard.wrap(shard.raw_local().contiguous(memory_format=memory_format), shard.vocab, shard.dtype)


def is_contiguous(shard: VocabShard, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    return shard._local.is_contiguous(memory_format=memory_format)


def clone(shard: VocabShard, *, memory_format: torch.memory_format = torch.preserve_format) -> VocabShard:
    return VocabShard.wrap(shard.raw_local().clone(memory_format=memory_format), shard.vocab, shard.dtype)


def detach(shard: VocabShard) -> VocabShard:
    return shard.view_from(shard._local)


def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``to(dtype)``, ``to(device, dtype)``, ``to(other)``. A shard stays on its device: its collectives belong there."""
    kwargs = {
        name: value for name, value in kwargs.items() if name != "copy"
    }  # no operation on shards writes into shared memory
    args = tuple(part for arg in args for part in ((arg.device, arg.dtype) if isinstance(arg, Tensor) else (arg,)))
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if not isinstance(tensor, VocabShard):
        return tensor.to(device=device, dtype=dtype)
    if device is not None and torch.empty(0, device=device).device != tensor.device:
        raise NeedsWholeVocabulary(f"a slice stays on its device ({tensor.device} -> {device})")
    return cast(tensor, dtype or tensor.dtype)


def cast(shard: VocabShard, dtype: torch.dtype) -> VocabShard:
    """Show the slice in another dtype. Half precision -> fp32 is only noted: the copy would be twice the size."""
    if dtype == shard.dtype:
        return shard
    if dtype == torch.float32 and shard.dtype in (torch.bfloat16, torch.float16):
        return VocabShard.wrap(shard.raw_local(), shard.vocab, dtype)
    return VocabShard.wrap(shard.to_local().to(dtype), shard.vocab)
