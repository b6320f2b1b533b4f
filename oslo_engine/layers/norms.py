"""Norms over features of which each tp rank holds some: the model's own code, with the statistics of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from oslo_engine.comm.collectives import Axis, all_reduce_sum
from oslo_engine.errors import UnsupportedError
from oslo_engine.layers.specialize import specialize
from oslo_engine.shards import Span

_REDUCTIONS = ("mean", "sum", "var")
# Reductions that no rule below turns into one over all ranks: better an error than a wrong statistic.
_UNKNOWN = {"norm", "vector_norm", "normalize", "std", "std_mean", "var_mean", "amax", "max", "logsumexp", "softmax"}


def whole_norm(
    module: nn.Module,
    axis: Axis,
    size: int,
    groups: int = 1,
    spans: Sequence[Span] | None = None,
    holders: Sequence[tuple[int, int]] = (),
) -> nn.Module:
    """Let a norm whose features are cut normalise over those of all ranks (in place).

    Args:
        module: any module that normalises over its last dimension by means, sums, variances, ``layer_norm`` or ``rms_norm``.
        size: the features that are normalised together.
        groups: how many such sets of features there are; with more than one the module views its input as
            [..., groups of this rank, features].
        spans: the groups of which each rank holds features. Where no two ranks share one, the module is left alone.
        holders: (features, ranks that hold them) of this rank's features in order, where some are on several ranks; each of
            these counts its part of them.

    Communication: one all-reduce on tp of [..., groups] for each statistic, forward and backward.
    """
    spans = tuple(spans) if spans is not None else ((0, groups),) * axis.size
    if sum(stop - start for start, stop in spans) == groups:
        return module
    return specialize(module, _WholeNorm, _norm_sums=_Sums(axis, size, groups, spans[axis.rank], tuple(holders)))


@dataclass(frozen=True)
class _Sums:
    """Sums over the features of all ranks, for each group apart."""

    axis: Axis
    size: int
    groups: int
    span: Span
    holders: tuple[tuple[int, int], ...]

    def __call__(self, x: Tensor) -> Tensor:
        if self.holders:
            x = x * torch.cat([x.new_full((features,), 1 / ranks) for features, ranks in self.holders])
        local = x.sum(-1, keepdim=True)
        if self.groups == 1:
            return _SumOverRanks.apply(local, self.axis)
        start, stop = self.span
        if local.ndim < 2 or local.shape[-2] != stop - start:
            raise UnsupportedError(
                "a norm in groups must see its input as [..., groups, features]",
                expected=f"{stop - start} groups on this rank",
                got=str(tuple(x.shape)),
            )
        every = F.pad(local, (0, 0, start, self.groups - stop))
        return _SumOverRanks.apply(every, self.axis).narrow(-2, start, stop - start)


class _WholeNorm:
    _norm_sums: _Sums

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Statistics(self._norm_sums):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class _Statistics(TorchFunctionMode):
    """Within: reductions over the last dimension are over the features of all ranks."""

    def __init__(self, sums: _Sums) -> None:
        super().__init__()
        self.sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("layer_norm", "rms_norm"):
            return self._normalize(name, *args, **kwargs)
        if name in _REDUCTIONS and self._over_features(name, *args, **kwargs):
            value, keep = getattr(self, f"_{name}")(*args, **kwargs)
            return value if keep else value.squeeze(-1)
        if name in _UNKNOWN:
            raise UnsupportedError(f"a norm over the features of all ranks cannot use {name!r}")
        return func(*args, **kwargs)

    def _over_features(self, name: str, x: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> bool:
        dims = dim if isinstance(dim, (tuple, list)) else (dim,) if dim is not None else tuple(range(x.ndim))
        last = any(one in (-1, x.ndim - 1) for one in dims)
        if last and len(dims) > 1:
            raise UnsupportedError(
                f"a norm over the features of all ranks cannot use {name!r} over other dimensions too",
                expected="the last dimension alone",
                got=f"dim={dim}",
            )
        return last

    # Each takes what torch's function of the name takes and returns what it computes, and whether the dimension is kept.

    def _sum(self, x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> tuple[Tensor, bool]:
        return self.sums(x if dtype is None else x.to(dtype)), keepdim

    def _mean(self, x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> tuple[Tensor, bool]:
        return self._average(x if dtype is None else x.to(dtype)), keepdim

    def _var(
        self, x: Tensor, dim: Any, unbiased: bool = True, keepdim: bool = False, *, correction: float | None = None
    ) -> tuple[Tensor, bool]:
        degrees = self.sums.size - (int(unbiased) if correction is None else correction)
        return self.sums((x - self._average(x)).square()) / degrees, keepdim

    def _average(self, x: Tensor) -> Tensor:
        return self.sums(x) / self.sums.size

    def _normalize(
        self, name: str, input: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float | None = None
    ) -> Tensor:
        if name == "rms_norm" and not isinstance(bias, Tensor):
            bias, eps = None, eps if bias is None else bias  # rms_norm(input, shape, weight, eps)
        x = input - self._average(input) if name == "layer_norm" else input
        if eps is None:
            eps = 1e-5 if name == "layer_norm" else torch.finfo(input.dtype).eps
        y = x * torch.rsqrt(self._average(x.square()) + eps)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias


class _SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_reduce_sum(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad, ctx.axis), None
