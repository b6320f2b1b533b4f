"""What a block does to a key/value cache, seen while it is recorded: which layers it writes, in which way.

A stage that does not run a block repeats this on its own copy of the cache (``pipeline.ghost_cache``). It is watched and not
deduced: a block may write several layers, another one at each call, a state or an index beside keys and values, or nothing.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

# Methods of a cache (or one of its layers) that take what is new -> the dimension of each tensor that counts tokens.
_LENGTH_DIMS: dict[str, int | None] = {
    "update": -2,  # [rows, heads, tokens, features]
    "update_conv_state": -1,  # [rows, channels, tokens]
    "update_recurrent_state": None,
    "update_indexer": 1,  # [rows, tokens, features]
    "update_index": -2,  # [rows, heads, tokens, features]
}
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class Ghost:
    """Stands for a tensor: as many rows and tokens as the block's input says, everything else of size one.

    Attributes:
        ndim: of the tensor; its first dimension counts rows.
        length_dim: the dimension that counts tokens, if any.
        rows_of: the dimension of the block's input that counts rows.
        tokens_of: the dimension of the block's input that counts positions.
        tokens: for each position; less than one where the input holds several streams of the same tokens.
    """

    ndim: int
    length_dim: int | None
    rows_of: int
    tokens_of: int
    tokens: Fraction

    @classmethod
    def of(cls, tensor: Tensor, length_dim: int | None, hidden: Tensor) -> Ghost:
        """Which dimensions of the block's input correspond to those of a tensor that it put into the cache."""
        tokens = None if length_dim is None else tensor.shape[length_dim]
        sizes = hidden.shape[:-1]
        same = [dim for dim, size in enumerate(sizes) if size == tokens]
        multiple = [dim for dim, size in enumerate(sizes) if tokens and dim and size % tokens == 0]
        tokens_of = (same or multiple or [len(sizes) - 1])[0]
        rows = [dim for dim, size in enumerate(sizes) if size == tensor.shape[0] and dim != tokens_of]
        rows_of = max((dim for dim in rows if dim < tokens_of), default=rows[0] if rows else 0)
        return cls(tensor.ndim, length_dim, rows_of, tokens_of, Fraction(tokens or 0, sizes[tokens_of]))

    def shape(self, hidden: Tensor) -> tuple[int, ...]:
        sizes = [1] * self.ndim
        sizes[0] = hidden.shape[self.rows_of]
        if self.length_dim is not None:
            sizes[self.length_dim] = math.ceil(hidden.shape[self.tokens_of] * self.tokens)
        return tuple(sizes)


@dataclass(frozen=True)
class CacheCall:
    """One call that wrote into a cache.

    Attributes:
        part: "" for the cache itself; "self_attention_cache" or "cross_attention_cache" of one that has both.
        layer: of the layer whose method was called; None for a method of the cache.
        method: its name.
        arguments: by name; a ``Ghost`` where a tensor was, other objects are left out.
    """

    part: str
    layer: int | None
    method: str
    arguments: tuple[tuple[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        arguments = {name: repr(value) if isinstance(value, Ghost) else value for name, value in self.arguments}
        return {"part": self.part, "layer": self.layer, "method": self.method, "arguments": arguments}


def find_cache(values: Any) -> Cache | None:
    """The cache among the arguments of a call, if any."""
    leaves = pytree.tree_leaves(values, is_leaf=lambda leaf: isinstance(leaf, Cache))
    return next((leaf for leaf in leaves if isinstance(leaf, Cache)), None)


def wraps(outer: Cache | None, inner: Cache | None) -> bool:
    """Whether one cache was made to hold the other, for a model that needs two."""
    return isinstance(outer, EncoderDecoderCache) and inner is not None and outer.self_attention_cache is inner


def first_tensor(arguments: Any) -> Tensor:
    return next(leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))


@contextmanager
def watched(arguments: Mapping[str, Any]) -> Iterator[list[CacheCall]]:
    """Within, note in a list what is called on the cache among a block's arguments, and on its layers; inner calls left out."""
    cache = find_cache(arguments)
    seen: list[CacheCall] = []
    watch = _Watch(seen, first_tensor(arguments))
    with ExitStack() as stack:
        if isinstance(cache, EncoderDecoderCache):
            for part in ("self_attention_cache", "cross_attention_cache"):
                stack.enter_context(watch.on(getattr(cache, part), part))
        elif cache is not None:
            stack.enter_context(watch.on(cache, ""))
        yield seen


class _Watch:
    def __init__(self, seen: list[CacheCall], hidden: Tensor) -> None:
        self._seen, self._hidden, self._depth = seen, hidden, 0

    @contextmanager
    def on(self, cache: Any, part: str) -> Iterator[None]:
        holders = [(cache, None), *((layer, number) for number, layer in enumerate(getattr(cache, "layers", ())))]
        wrapped: list[tuple[Any, str]] = []
        for holder, layer in holders:
            for method in _LENGTH_DIMS:
                if hasattr(holder, method) and method not in vars(holder):
                    call = functools.partial(self._call, getattr(holder, method), part, layer, method)
                    setattr(holder, method, call)
                    wrapped.append((holder, method))
        try:
            yield
        finally:
            for holder, method in wrapped:
                delattr(holder, method)

    def _call(self, original: Callable[..., Any], part: str, layer: int | None, method: str, *args: Any, **kwargs: Any) -> Any:
        if not self._depth:
            self._seen.append(CacheCall(part, layer, method, self._described(original, method, args, kwargs)))
        self._depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._depth -= 1

    def _described(
        self, original: Callable[..., Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[str, Any], ...]:
        named: list[tuple[str, Any]] = []
        signature = inspect.signature(original)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if signature.parameters[name].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                continue  # positions and the like: for layers that compute with them, and a ghost computes nothing
            if isinstance(value, Tensor):
                named.append((name, Ghost.of(value, _LENGTH_DIMS[method], self._hidden)))
            elif isinstance(value, _PLAIN):
                named.append((name, value))
        return tuple(named)
