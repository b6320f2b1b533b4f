"""When two calls of an operation give results of the same shapes: a key that is equal for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Key = tuple[Any, ...]
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class NotPlainError(Exception):
    """There is more to an argument than a key says."""


def call_key(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], describe: Callable[[Tensor], Key], tensors: list[Tensor]
) -> Key:
    """
    Args:
        describe: what of a tensor matters.
        tensors: those among the arguments are added to it, in order.

    Raises:
        NotPlainError: an argument is no tensor, plain value or sequence of such; or ``describe`` says so.
    """
    key: list[Any] = [func, torch.get_default_dtype()]
    _add(key, args, describe, tensors)
    if kwargs:
        _add(key, kwargs, describe, tensors)
        _add(key, kwargs.values(), describe, tensors)
    return tuple(key)


def _add(key: list[Any], values: Any, describe: Callable[[Tensor], Key], tensors: list[Tensor]) -> None:
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            tensors.append(value)
            key.append(describe(value))
        elif kind is list or kind is tuple:
            key.append((kind, len(value)))
            _add(key, value, describe, tensors)
        elif kind in PLAIN:
            key += (kind, value)  # 1, 1.0 and True are equal, and give different dtypes
        else:
            raise NotPlainError
