"""Rotary embedding as models write it, ``x * cos + cat((-x2, x1)) * sin`` with x1 and x2 the halves of x.

That both halves of x meet the same angles is seen on the values of the probe, where cos and sin are real; what is looked at
here is that the three tensors are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oslo_engine.fusion.deferred import LikeX, is_plain, recipe_of


@dataclass(frozen=True)
class Negated(LikeX):
    """``-x``."""

    x: Tensor

    def compute(self, kernels: bool) -> Tensor:
        return -self.x


@dataclass(frozen=True)
class Swapped:
    """``cat((-second, first))``, and that times ``sin`` where there is one."""

    first: Tensor
    second: Tensor
    sin: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.first, self.second

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.first.shape[:-1], 2 * self.first.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    def compute(self, kernels: bool) -> Tensor:
        swapped = torch.cat((-self.second, self.first), -1)
        return swapped if self.sin is None else swapped * self.sin


@dataclass(frozen=True)
class Turned(LikeX):
    """``x * cos``."""

    x: Tensor
    cos: Tensor

    def compute(self, kernels: bool) -> Tensor:
        return self.x * self.cos


@dataclass(frozen=True)
class Rotation:
    """All that the kernel needs."""

    x: Tensor
    cos: Tensor
    sin: Tensor

    def turn(self) -> Tensor:
        from oslo_engine.kernels.rotary import rotary

        half = self.x.shape[-1] // 2
        return rotary(self.x, self.cos[..., :half], self.sin[..., :half])

    @property
    def repeats(self) -> bool:
        """Whether both halves meet the same angles, and there are any. Looks at values."""
        half = self.x.shape[-1] // 2
        turns = bool((self.sin != 0).any())  # a model on meta has no frequencies, and all angles would be 0
        return turns and all(bool(torch.equal(table[..., :half], table[..., half:])) for table in (self.cos, self.sin))


def second_half_of(first: Tensor, second: Tensor) -> bool:
    """Whether ``second`` lies directly behind ``first`` in each row of one tensor."""
    same = first.shape == second.shape and first.stride() == second.stride() and first.dtype == second.dtype
    step = first.shape[-1] * first.stride(-1)
    return same and _starts(second) == _starts(first, step)


def _starts(x: Tensor, after: int = 0) -> tuple[Any, Any]:
    return x.untyped_storage()._cdata, x.storage_offset() + after


def turn_by(a: Any, b: Any) -> Turned | Swapped | None:
    """``x * cos`` or ``swapped * sin``, in either order; None where it is neither."""
    for x, table in ((a, b), (b, a)):
        if not is_plain(table) or table.dim() != 4 or table.requires_grad:
            continue
        swapped = recipe_of(x, Swapped)
        if swapped is not None and swapped.sin is None and _fits(table, swapped.shape, swapped.dtype):
            return Swapped(swapped.first, swapped.second, table)
        if is_plain(x) and x.dim() == 4 and x.shape[-1] % 2 == 0 and _fits(table, x.shape, x.dtype) and table.shape != x.shape:
            return Turned(x, table)
    return None


def _fits(table: Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    broadcasts = all(size in (1, whole) for size, whole in zip(table.shape[:-1], shape[:-1], strict=True))
    return table.dtype == dtype and table.shape[-1] == shape[-1] and broadcasts


def rotation(a: Any, b: Any) -> Rotation | None:
    """What ``a + b`` rotates, if it does."""
    for one, other in ((a, b), (b, a)):
        turned, swapped = recipe_of(one, Turned), recipe_of(other, Swapped)
        if turned is None or swapped is None or swapped.sin is None:
            continue
        x, first = turned.x, swapped.first
        same = _starts(x) == _starts(first) and x.stride() == first.stride() and x.shape == swapped.shape
        if same and turned.cos.shape == swapped.sin.shape:
            return Rotation(x, turned.cos, swapped.sin)
    return None
