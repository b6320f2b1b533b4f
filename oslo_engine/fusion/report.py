"""What ``fuse`` did: which kernel runs where, what was left as it was, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

KERNELS = {
    "bias_gelu": "bias + GELU",
    "bias_dropout_residual": "bias + dropout + residual",
    "scale_mask_softmax": "scale + mask + softmax",
    "layer_norm": "LayerNorm",
    "add_layer_norm": "residual + LayerNorm",
    "rms_norm": "RMSNorm",
    "add_rms_norm": "residual + RMSNorm",
    "glu": "activation * up (SwiGLU, GeGLU)",
    "rotary": "rotary embedding",
    "cross_entropy": "cross-entropy",
}


@dataclass(frozen=True)
class Place:
    """One place of the model.

    Attributes:
        module: name of the module whose result is used, or in whose forward it happens.
        kernel: which one, a key of ``KERNELS``; for what was left, the one that it is about.
        reason: why it was left as it was; empty where the kernel runs.
    """

    module: str
    kernel: str
    reason: str = ""


@dataclass(frozen=True)
class FusionReport:
    """See the module.

    Attributes:
        model: its class.
        targets: what was asked for; empty for everything.
        places: all that were found.
    """

    model: str
    targets: tuple[str, ...]
    places: tuple[Place, ...]

    @property
    def replaced(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if not place.reason)

    @property
    def left(self) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.reason)

    @property
    def counts(self) -> dict[str, int]:
        """Number of places by kernel."""
        return dict(Counter(place.kernel for place in self.replaced))

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, number, where, why it was left) with the numbers of blocks left out of the names."""
        return [
            (KERNELS[kernel], str(number), where, reason)
            for (kernel, where, reason), number in _grouped(self.replaced) + _grouped(self.left)
        ]

    def __str__(self) -> str:
        asked = ", ".join(self.targets) or "everything"
        lines = [f"{self.model}, targets: {asked}"]
        for title, places in (("replaced", self.replaced), ("left as it was", self.left)):
            lines.append(f"{title}: {len(places)}")
            for (kernel, where, reason), number in _grouped(places):
                lines.append(f"  {number:4d} x {KERNELS[kernel]:32} {where}" + (f": {reason}" if reason else ""))
        return "\n".join(lines)


def _grouped(places: Iterable[Place]) -> list[tuple[tuple[str, str, str], int]]:
    return list(Counter((place.kernel, re.sub(r"\b\d+\b", "*", place.module), place.reason) for place in places).items())
