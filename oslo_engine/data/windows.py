"""How documents are laid out in windows of a fixed length: which token ranges of the file each window consists of."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from oslo_engine.data.index_cache import Arrays
from oslo_engine.data.shuffle import Permutation

Piece = tuple[int, int]  # first token and the one behind the last


class Layout(Protocol):
    def __len__(self) -> int:
        """Number of windows, a last one that is not full among them."""
        ...

    def pieces(self, window: int, at_borders: bool) -> list[Piece]:
        """The token ranges of a window, in order; cut where a document begins, if asked for."""
        ...


class Contiguous:
    """Documents in the order of the file, one after another.

    Args:
        bounds: where each document begins and the last one ends, i64[documents + 1].
    """

    def __init__(self, bounds: NDArray[np.int64], length: int) -> None:
        self._bounds, self._length = bounds, length
        self._first, self._last = int(bounds[0]), int(bounds[-1])

    def __len__(self) -> int:
        return -(-(self._last - self._first) // self._length)

    def pieces(self, window: int, at_borders: bool) -> list[Piece]:
        start = self._first + window * self._length
        stop = min(start + self._length, self._last)
        if not at_borders:
            return [(start, stop)]
        inside = self._bounds[self._bounds.searchsorted(start, "right") : self._bounds.searchsorted(stop, "left")]
        cuts = [start, *np.unique(inside).tolist(), stop]
        return list(pairwise(cuts))


class Shuffled:
    """Documents in another order, one after another.

    Args:
        arrays: what ``shuffled_arrays`` returns.
    """

    def __init__(self, arrays: Arrays, length: int) -> None:
        self._starts, self._ends, self._length = arrays["starts"], arrays["ends"], length
        self._num_tokens = int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        return -(-self._num_tokens // self._length)

    def pieces(self, window: int, at_borders: bool) -> list[Piece]:
        position = window * self._length
        left = min(self._length, self._num_tokens - position)
        number = int(self._ends.searchsorted(position, "right"))
        end = self._ends.item(number)
        start = self._starts.item(number) + position - (self._ends.item(number - 1) if number else 0)
        found = []
        while True:
            count = min(left, end - position)
            found.append((start, start + count))
            left -= count
            if not left:
                return found
            number, position = number + 1, end
            start, end = self._starts.item(number), self._ends.item(number)


def shuffled_arrays(bounds: NDArray[np.int64], *seed: object) -> Arrays:
    """Where each document begins in the file and ends in the new order, for documents that are not empty."""
    lengths = np.diff(bounds)
    order = np.flatnonzero(lengths)
    order = order[Permutation(len(order), *seed).of(np.arange(len(order)))]
    return {"starts": bounds[:-1][order], "ends": np.cumsum(lengths[order])}


class BestFit:
    """Whole documents in as few windows as best fit decreasing finds; only those longer than a window are cut.

    Args:
        arrays: what ``best_fit_arrays`` returns.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._starts, self._stops, self._firsts = arrays["starts"], arrays["stops"], arrays["firsts"]

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def pieces(self, window: int, at_borders: bool) -> list[Piece]:
        of_window = slice(self._firsts.item(window), self._firsts.item(window + 1))
        return list(zip(self._starts[of_window].tolist(), self._stops[of_window].tolist(), strict=True))


def best_fit_arrays(bounds: NDArray[np.int64], length: int) -> Arrays:
    """The pieces of all windows, and which is the first of each window.

    Pieces are placed by falling length, each into the window where it leaves the least room. The windows with a given room are
    kept in lists, and the rooms of which there are any as bits of a number, whose lowest bit from the length on is the best.
    """
    lengths = np.diff(bounds)
    num_full = lengths // length
    full_of = np.repeat(np.arange(len(lengths)), num_full)
    number_in = np.arange(len(full_of)) - np.repeat(np.cumsum(num_full) - num_full, num_full)
    full_starts = bounds[full_of] + number_in * length
    rest = lengths - num_full * length
    order = np.argsort(-rest, kind="stable")[: int(np.count_nonzero(rest))]
    window_of = np.empty(len(order), np.int64)
    with_room: dict[int, list[int]] = {}
    rooms = num_windows = 0
    for at, size in enumerate(rest[order].tolist()):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, window = length, num_windows
            num_windows += 1
        window_of[at] = window
        if room > size:
            with_room.setdefault(room - size, []).append(window)
            rooms |= 1 << (room - size)
    stops = bounds[1:][order]
    starts = stops - rest[order]
    windows = np.concatenate([np.arange(len(full_starts)), window_of + len(full_starts)])
    by_window = np.argsort(windows, kind="stable")
    return {
        "starts": np.concatenate([full_starts, starts])[by_window],
        "stops": np.concatenate([full_starts + length, stops])[by_window],
        "firsts": np.searchsorted(windows[by_window], np.arange(len(full_starts) + num_windows + 1)),
    }
