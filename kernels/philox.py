"""Philox4x32-10: random bits as a function of a seed and a counter, so that a mask is computed again and never stored.

Bit for bit what ``tl.philox`` gives inside Triton programs.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11); the constants are those of Random123.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def draw_seed(device: torch.device | str) -> Tensor:
    """A seed from the device's ambient generator, so from whichever random stream is current; nothing waits for the device."""
    return torch.empty((), dtype=torch.int64, device=device).random_()


def random_bits(seed: Tensor, counter: Tensor) -> Tensor:
    """Four numbers below 2^32 for each counter.

    Args:
        seed: [], int64.
        counter: [..], int64; its two halves are the first two words of Philox's counter, the others are 0.

    Returns:
        [.., 4], int64.
    """
    words = [counter & _LOW, (counter >> 32) & _LOW, torch.zeros_like(counter), torch.zeros_like(counter)]
    keys = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(_ROUNDS):
        low, high = zip(*(_product(words[2 * i], _MULTIPLIERS[i]) for i in range(2)), strict=True)
        words = [high[1] ^ words[1] ^ keys[0], low[1], high[0] ^ words[3] ^ keys[1], low[0]]
        keys = [(key + step) & _LOW for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return torch.stack(words, -1)


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of a * b. The whole does not fit in int64, so b is taken in halves of 16 bits."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)
    return (a * b) & _LOW, (upper + (lower >> 16)) >> 16
