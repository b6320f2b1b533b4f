"""Weights to verify with: random, without symmetry, the same on every rank.

A model's own initialisation hides mistakes: biases are zero and norms one, so that a bias added twice or a norm of the wrong
rank changes nothing. Here every entry of every parameter is a number of its own.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

_HALF_WIDTH = math.sqrt(3.0)  # of the uniform distribution with variance 1: bounded, so that no vector reaches 0 or 1


def fill(model: nn.Module, seed: int) -> None:
    """Overwrite every parameter, in place; a tied one by its first name.

    What a class does not save, since its initialisation makes it (sinusoids), is initialised.
    """
    fixed = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in fixed:
                parameter._is_hf_initialized = False  # type: ignore[attr-defined]
                model._init_weights(model.get_submodule(name.rpartition(".")[0]))  # type: ignore[operator]
            else:
                parameter.copy_(values(name, tuple(parameter.shape), seed))


def values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The entries of one parameter; they depend on nothing but its name, its shape and the seed.

    Vectors lie around 0.6, biases around 0.2. Matrices have the variance that keeps activations of the size they came in, and a
    mean of a tenth of their spread. So sums in float32 stay accurate to a few units in the last place.
    """
    generator = torch.Generator().manual_seed(_seed_of(name, seed))
    spread = 0.15 if len(shape) < 2 else 0.8 / math.sqrt(math.prod(shape[1:]))
    mean = 0.1 * spread if len(shape) > 1 else 0.2 if name.endswith("bias") else 0.6
    return torch.empty(shape).uniform_(mean - _HALF_WIDTH * spread, mean + _HALF_WIDTH * spread, generator=generator)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
