"""Several data sets as one, in given proportions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from oslo_engine.data.shuffle import Permutation
from oslo_engine.errors import DataError

_BLOCK = 1 << 10


class DatasetBlender(Dataset[Any]):
    """Items of several data sets, mixed so that after any number n of items each set has given its weight times n, within one.

    A set is gone through in a random order, and when it is used up, again in another one; so over many epochs (``set_epoch``)
    all its items are used equally often, however large its weight.

    Args:
        datasets: any with a length and items by number.
        weights: proportions, as numbers that need not add up to 1; 0 leaves a set out. By default the lengths: then an epoch
            has every item once.
        num_samples: length of an epoch; by default that of all sets with a weight.
        seed: of the random orders.

    Raises:
        DataError: there is nothing to blend, or a weight is none.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float] | None = None,
        *,
        num_samples: int | None = None,
        seed: int = 0,
    ) -> None:
        self.datasets = list(datasets)
        self._lengths = [len(each) for each in self.datasets]
        given = list(self._lengths if weights is None else weights)
        self._check(given)
        self.seed = seed
        # As written: 0.7 means seven tenths.
        shares = [Fraction(str(weight)) if weight else Fraction(0) for weight in given]
        self._length = num_samples or sum(size for size, share in zip(self._lengths, shares, strict=True) if share)
        self._schedule = Schedule(shares, self._length)
        self.weights = [float(share / sum(shares)) for share in shares]
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def _check(self, weights: list[float]) -> None:
        if len(weights) != len(self.datasets):
            raise DataError("a weight for each data set", expected=len(self.datasets), got=len(weights))
        for number, (weight, size) in enumerate(zip(weights, self._lengths, strict=True)):
            if not (math.isfinite(weight) and weight >= 0):
                raise DataError("a weight must be a number that is not negative", where=f"data set {number}", got=weight)
            if weight and not size:
                raise DataError("an empty data set cannot have a weight", where=f"data set {number}", got=weight)
        if not any(weights):
            raise DataError("there is nothing to blend", expected="a data set with a weight above 0", got=weights)

    def set_epoch(self, epoch: int) -> None:
        """The next epoch goes on where the one before ended, in the items of each set."""
        self._epoch[0] = epoch

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Any:
        number, item = self.source_of(position)
        return self.datasets[number][item]

    def source_of(self, position: int) -> tuple[int, int]:
        """Which data set, and which of its items, an item of this epoch is."""
        if not -self._length <= position < self._length:
            raise IndexError(f"item {position} of {self._length}")
        number, count = self._schedule.at(int(self._epoch) * self._length + position % self._length)
        passes, within = divmod(count, self._lengths[number])
        return number, Permutation(self._lengths[number], self.seed, number, passes).at(within)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": int(self._epoch), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises DataError where the state is that of another blend."""
        if {name: state.get(name) for name in self._identity()} != self._identity():
            raise DataError("a state of another blend", expected=self._identity(), got=state)
        self.set_epoch(state["epoch"])

    def _identity(self) -> dict[str, Any]:
        return {"lengths": self._lengths, "weights": self.weights, "samples": self._length, "seed": self.seed}


class Schedule:
    """An endless order of several sources, in which each keeps to its share within one item at every point.

    Of the items that are due (Tijdeman's algorithm for the chairman assignment problem) the one comes next that must come
    soonest. The order repeats when the shares come out even, and at the latest after ``longest`` items.

    Args:
        shares: not all of them 0.
    """

    def __init__(self, shares: Sequence[Fraction], longest: int) -> None:
        total = sum(shares)
        scale = math.lcm(*(share.denominator for share in shares)) if shares else 1
        parts = [int(share * scale) for share in shares]
        common = math.gcd(*parts)
        self._parts, whole = [part // common for part in parts], int(total * scale) // common
        self.period = min(whole, longest)
        self._order = self._make(whole)
        starts = range(0, self.period, _BLOCK)
        counts = [np.bincount(self._order[start : start + _BLOCK], minlength=len(parts)) for start in starts]
        self._before = np.cumsum([np.zeros(len(parts), np.int64), *counts], axis=0)

    def _make(self, whole: int) -> NDArray[np.uint16]:
        order = np.empty(self.period, np.uint16)
        active = [number for number, part in enumerate(self._parts) if part]
        if len(active) == 1:
            order.fill(active[0])
            return order
        scale = 2 * len(active) - 2
        # Of the j-th item of a source with share p / whole: the first place at which it is due, and the last it may have.
        due = [(-(-whole // (scale * self._parts[number])) - 1, number) for number in active]
        heapq.heapify(due)
        ready: list[tuple[int, int]] = []
        counts = [0] * len(self._parts)
        for place in range(self.period):
            while due and due[0][0] <= place:
                number = heapq.heappop(due)[1]
                limit = whole * (scale * counts[number] + scale - 1) // (scale * self._parts[number])
                heapq.heappush(ready, (limit, number))
            number = heapq.heappop(ready)[1]
            order[place] = number
            counts[number] += 1
            first = -(-whole * (1 + scale * counts[number]) // (scale * self._parts[number])) - 1
            heapq.heappush(due, (first, number))
        return order

    def at(self, place: int) -> tuple[int, int]:
        """The source at a place, and how many items it has given before."""
        periods, within = divmod(place, self.period)
        number = int(self._order[within])
        block = within // _BLOCK
        before = int(np.count_nonzero(self._order[block * _BLOCK : within] == number))
        return number, periods * int(self._before[-1, number]) + int(self._before[block, number]) + before
