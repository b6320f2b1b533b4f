"""How far two results are apart, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oslo_engine.verify.settings import DType

# AdamW's eps, as a part of the largest gradient: below it, an update is no longer the gradient's sign, which rounding decides.
ADAM_EPS = 1e-2


@dataclass(frozen=True)
class Limits:
    """The largest relative errors that pass.

    logits, loss, gradients: by contract in float32. In float64 gradients are less accurate than the rest, since models compute
        norms and softmax in float32 whatever their type. In 16 bits every layer rounds its activations: an unsplit model's
        gradients are up to 0.13 (bfloat16) and 0.07 (float16) from those in float32; a sum forgotten by two ranks makes 0.5.
    norm: it is computed in float32 at most.
    updates: what an error of ``gradients`` can make of an update, the largest being 1: gradients / ADAM_EPS. None: no check.
    floor: a gradient is compared with its own size, but with at least this part of the model's largest. The gradient of a key
        bias, for one, is zero but for rounding.
    by_entry: whether the size of a gradient, and of its error, is its largest entry; otherwise their root mean square, since in
        16 bits a rounded activation here and there falls on the other side of a kink (ReLU).
    """

    logits: float
    loss: float
    gradients: float
    norm: float
    updates: float | None
    floor: float = 1e-3
    by_entry: bool = True


LIMITS: Mapping[DType, Limits] = {
    "float32": Limits(1e-5, 1e-5, 1e-4, 1e-4, 1e-4 / ADAM_EPS),
    "float64": Limits(1e-10, 1e-10, 1e-6, 1e-6, 1e-6 / ADAM_EPS),
    "bfloat16": Limits(5e-2, 2e-2, 0.25, 5e-2, None, floor=5e-2, by_entry=False),
    "float16": Limits(1e-2, 5e-3, 0.15, 1e-2, None, floor=5e-2, by_entry=False),
}


@dataclass(frozen=True)
class Error:
    """A relative error and what has it."""

    value: float
    name: str = ""


def relative_error(got: Tensor, wanted: Tensor, scale: float | None = None) -> float:
    """Largest difference, as a part of ``scale`` (default: ``wanted``'s largest entry). Infinite for other shapes or NaN."""
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


# A gradient may be off by this many times what rounding does to the unsplit model's.
ROUNDINGS = 4


def without_padding(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits at real tokens: what stands at padded positions means nothing. All of them where the batch has no such mask."""
    mask = batch.get("attention_mask")
    return logits if mask is None or mask.shape != logits.shape[:2] else logits[mask.bool()]


def gradient_errors(
    pairs: Iterable[tuple[str, Tensor | None, Tensor | None]],
    largest: float,
    limits: Limits,
    rounding: Mapping[str, float] | None = None,
) -> Error:
    """The parameter whose gradient is wrong by most.

    Args:
        pairs: (name, gradient, what it should be); None counts as zero.
        largest: size of the model's largest gradient.
        rounding: name -> size of what rounding does to this gradient in the unsplit model: that many times ``ROUNDINGS`` is no
            error. Some are sums of large numbers that nearly cancel.
    """
    worst = Error(0.0)
    for name, got, wanted in pairs:
        present = wanted if wanted is not None else got
        if present is None:
            continue
        got, wanted = (torch.zeros_like(present) if tensor is None else tensor for tensor in (got, wanted))
        if got.shape != wanted.shape:
            return Error(math.inf, name)
        scale = max(size_of(wanted, limits), limits.floor * largest)
        difference = size_of(got.double() - wanted.double(), limits)
        if rounding is not None and not math.isnan(difference):
            difference = max(difference - ROUNDINGS * rounding.get(name, 0.0), 0.0)
        error = math.inf if math.isnan(difference) else difference / scale if scale > 0 else 0.0
        worst = max(worst, Error(error, name), key=lambda each: each.value)
    return worst


def size_of(gradient: Tensor, limits: Limits) -> float:
    """Its largest entry, or the root mean square of all; 0 for none."""
    if not gradient.numel():
        return 0.0
    gradient = gradient.detach().double()
    return float(gradient.abs().max() if limits.by_entry else gradient.square().mean().sqrt())


def bits_that_differ(got: Tensor, wanted: Tensor) -> int:
    """Number of entries that are not bit for bit the same; all of them for another shape, or a type that holds less.

    A wider type is none: loading may keep some weights in float32 that were saved in 16 bits, without changing their values.
    """
    if got.shape != wanted.shape or torch.promote_types(got.dtype, wanted.dtype) != got.dtype:
        return max(got.numel(), wanted.numel(), 1)
    if not got.numel():
        return 0
    flat = [tensor.detach().cpu().to(got.dtype).contiguous().reshape(-1) for tensor in (got, wanted)]
    as_bytes = [tensor.view(torch.uint8).reshape(tensor.numel(), -1) for tensor in flat]
    return int((as_bytes[0] != as_bytes[1]).any(-1).sum())
