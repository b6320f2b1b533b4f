"""The activations of ``oslo_engine.kernels.activation`` inside Triton programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gate(x, FORM: tl.constexpr):
    """What x is multiplied by."""
    if FORM == "erf":
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FORM == "tanh":
        return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif FORM == "quick":
        return tl.sigmoid(1.702 * x)
    else:
        return tl.sigmoid(x)


@triton.jit
def activation(x, FORM: tl.constexpr):
    return x * _gate(x, FORM)


@triton.jit
def activation_and_slope(x, FORM: tl.constexpr):
    gate = _gate(x, FORM)
    if FORM == "erf":
        growth = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif FORM == "tanh":
        growth = gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif FORM == "quick":
        growth = gate * (1.0 - gate) * 1.702
    else:
        growth = gate * (1.0 - gate)
    return x * gate, gate + x * growth
