"""How far two results are apart, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oslo_engine.verify.settings import DType

# A parameter's gradient is compared with its own largest entry, but with at least this part of the model's largest: the gradient of
# a key bias, for one, is zero but for rounding.
FLOOR = 1e-3
# AdamW's eps, as a part of the largest gradient: below it, an update is no longer the gradient's sign, which rounding decides.
ADAM_EPS = 1e-2


@dataclass(frozen=True)
class Limits:
    """The largest relative errors that pass.

    logits, loss, gradients: by contract in float32. The sums are the same in another order, so in other formats the limits are in
        proportion to their precision; in 16 bits every layer rounds its activations, which takes more room.
    norm: it is computed in float32 at most.
    updates: what an error of ``gradients`` can make of an update, the largest being 1: gradients / ADAM_EPS. None: not compared.
    """

    logits: float
    loss: float
    gradients: float
    norm: float
    updates: float | None


LIMITS: Mapping[DType, Limits] = {
    "float32": Limits(1e-5, 1e-5, 1e-4, 1e-4, 1e-4 / ADAM_EPS),
    "float64": Limits(1e-10, 1e-10, 1e-10, 1e-6, 1e-6 / ADAM_EPS),
    "bfloat16": Limits(5e-2, 2e-2, 2e-1, 5e-2, None),
    "float16": Limits(1e-2, 5e-3, 5e-2, 1e-2, None),
}


@dataclass(frozen=True)
class Error:
    """A relative error and what has it."""

    value: float
    name: str = ""


def relative_error(got: Tensor, wanted: Tensor, scale: float | None = None) -> float:
    """Largest difference, as a part of ``scale`` (default: the largest entry of ``wanted``). Infinite for other shapes or NaN."""
    if got.shape != wanted.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    wanted = wanted.detach().double()
    difference = float((got.detach().double() - wanted).abs().max())
    if math.isnan(difference):
        return math.inf
    size = float(wanted.abs().max()) if scale is None else scale
    return difference / size if size > 0 else (0.0 if difference == 0 else math.inf)


def gradient_errors(pairs: Iterable[tuple[str, Tensor | None, Tensor | None]], largest: float) -> Error:
    """The parameter whose gradient is wrong by most.

    Args:
        pairs: (name, gradient, what it should be); None counts as zero.
        largest: entry of all gradients of the unsplit model.
    """
    worst = Error(0.0)
    for name, got, wanted in pairs:
        if got is None and wanted is None:
            continue
        if got is None:
            got = torch.zeros_like(wanted)  # type: ignore[arg-type]
        if wanted is None:
            wanted = torch.zeros_like(got)
        own = float(wanted.detach().abs().max()) if wanted.numel() else 0.0
        error = relative_error(got, wanted, max(own, FLOOR * largest))
        if error > worst.value or (math.isinf(error) and not worst.name):
            worst = Error(error, name)
    return worst


def bits_that_differ(got: Tensor, wanted: Tensor) -> int:
    """Number of entries that are not bit for bit the same; all of them for another shape or type."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return max(got.numel(), wanted.numel(), 1)
    if not got.numel():
        return 0
    as_bytes = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), -1) for tensor in (got, wanted)]
    return int((as_bytes[0] != as_bytes[1]).any(-1).sum())
