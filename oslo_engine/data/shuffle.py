"""Shuffled orders that need no memory: the item at any position is computed, so a run goes on in the middle at no cost.

A position is put through a Feistel network over the next power of two, again and again until it lands below the size
(cycle walking). The orders do not depend on the version of any library.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64


class Permutation:
    """An order of ``size`` items.

    Args:
        size: how many.
        seed: numbers or words; others give another order.
    """

    def __init__(self, size: int, *seed: object) -> None:
        self.size = size
        bits = max(size - 1, 1).bit_length()
        self._low_bits = (bits + 1) // 2
        self._high_bits = max(bits - self._low_bits, 1)
        digest = hashlib.blake2b(repr(seed).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]

    def at(self, position: int) -> int:
        """The item at a position, which must be below the size."""
        low_bits, low_mask, high_mask = self._low_bits, (1 << self._low_bits) - 1, (1 << self._high_bits) - 1
        while True:
            high, low = position >> low_bits, position & low_mask
            for number, key in enumerate(self._keys):
                if number % 2:
                    low ^= _mixed(high + key) & low_mask
                else:
                    high ^= _mixed(low + key) & high_mask
            position = (high << low_bits) | low
            if position < self.size:
                return position

    def of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The items at many positions."""
        found = positions.astype(np.uint64)
        left = np.arange(len(found))
        while len(left):
            found[left] = walked = self._once(found[left])
            left = left[walked >= self.size]
        return found.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low_bits, low_mask = np.uint64(self._low_bits), np.uint64((1 << self._low_bits) - 1)
        high_mask = np.uint64((1 << self._high_bits) - 1)
        high, low = values >> low_bits, values & low_mask
        for number, key in enumerate(self._keys):
            if number % 2:
                low ^= _mixed_all(high + np.uint64(key)) & low_mask
            else:
                high ^= _mixed_all(low + np.uint64(key)) & high_mask
        return (high << low_bits) | low


def _mixed(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mixed_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))
