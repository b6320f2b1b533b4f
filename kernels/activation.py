"""The activations that bias_gelu and glu share, by name, and their slopes.

    erf      x * Phi(x), GELU as it is defined
    tanh     x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3); the same as 0.5 x (1 + tanh u)
    quick    x * sigmoid(1.702 x)
    silu     x * sigmoid(x)

Source: Hendrycks, Gimpel (arXiv 1606.08415).
"""

from __future__ import annotations

from math import pi, sqrt

import torch
from torch import Tensor

GELUS = ("erf", "tanh", "quick")
FORMS = (*GELUS, "silu")
_STEEPNESS = {"quick": 1.702, "silu": 1.0}


def activation(x: Tensor, form: str) -> Tensor:
    """In the precision of x."""
    if form == "erf":
        return x * _normal_cdf(x)
    return x * torch.sigmoid(2 * _tanh_argument(x) if form == "tanh" else _STEEPNESS[form] * x)


def slope(x: Tensor, form: str) -> Tensor:
    """The derivative at x."""
    if form == "erf":
        return _normal_cdf(x) + x * torch.exp(-0.5 * x * x) / sqrt(2 * pi)
    if form == "tanh":
        gate = torch.sigmoid(2 * _tanh_argument(x))
        return gate + x * gate * (1 - gate) * 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x)
    gate = torch.sigmoid(_STEEPNESS[form] * x)
    return gate + x * gate * (1 - gate) * _STEEPNESS[form]


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / sqrt(2)))


def _tanh_argument(x: Tensor) -> Tensor:
    return sqrt(2 / pi) * (x + 0.044715 * x * x * x)
