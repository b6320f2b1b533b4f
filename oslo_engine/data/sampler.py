"""Dividing what a sampler draws among data-parallel ranks."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler, SequentialSampler

from oslo_engine.data.shuffle import Permutation
from oslo_engine.errors import DataError

_BLOCK = 1 << 12


class DistributedProxySampler(Sampler[int]):
    """Any sampler, for one of several ranks: together they get what it draws, each index once.

    What is drawn does not depend on the ranks' random seeds: the sampler draws under one that follows from ``seed`` and the
    epoch. The order is one for all ranks, dealt out one by one; so a run that is resumed with another number of ranks goes on
    in the same order. A run through all of it leads to the next epoch, unless ``set_epoch`` says otherwise.

    Args:
        sampler: to be divided. With a ``SequentialSampler`` nothing is ever listed, and going on in mid-epoch costs nothing.
        num_replicas: ranks that get different data; by default those of ``mpu``, else of torch.distributed, else 1.
        rank: which of them this is.
        shuffle: shuffle what was drawn.
        seed: the same on all ranks.
        drop_last: leave out the last few, so that all ranks get equally many; else some get one more.
        mpu: ``model.mpu``: ranks that share one copy of the model (tp, pp) get the same.

    Raises:
        DataError: rank and num_replicas do not fit, or the sampler has no end.
    """

    def __init__(
        self,
        sampler: Sampler[int] | Sequence[int],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mpu: Any = None,
    ) -> None:
        if mpu is not None and (num_replicas is not None or rank is not None):
            raise DataError("the ranks are given twice", expected="mpu, or num_replicas and rank")
        replicas, own = _place_of_rank(mpu)
        self.sampler = sampler
        self.num_replicas = replicas if num_replicas is None else num_replicas
        self.rank = own if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise DataError("no such rank", expected=f"0 to {self.num_replicas - 1}", got=self.rank)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._start = 0  # of the epoch's order, over all ranks: what lies before was used already
        self._given = 0  # by this rank since then

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._start, self._given = epoch, 0, 0

    def num_drawn(self) -> int:
        """How many the sampler draws in an epoch."""
        try:
            return len(self.sampler)  # type: ignore[arg-type]
        except TypeError:
            return len(self._drawn())

    def num_left(self) -> int:
        """Of the epoch, for all ranks together."""
        left = self.num_drawn() - self._start
        return left - left % self.num_replicas if self.drop_last else left

    def __len__(self) -> int:
        return len(range(self.rank, self.num_left(), self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        drawn = self._drawn()
        count, start = len(drawn), self._start
        left = count - start
        stop = start + (left - left % self.num_replicas if self.drop_last else left)
        order = Permutation(count, "sampler", self.seed, self.epoch) if self.shuffle else None
        self._given = 0
        for first in range(start + self.rank, stop, _BLOCK * self.num_replicas):
            places = np.arange(first, min(first + _BLOCK * self.num_replicas, stop), self.num_replicas)
            if order is not None:
                places = order.of(places)
            for index in places.tolist() if isinstance(drawn, range) else drawn[places].tolist():
                self._given += 1
                yield index
        self.set_epoch(self.epoch + 1)

    def _drawn(self) -> range | np.ndarray[Any, Any]:
        if isinstance(self.sampler, (SequentialSampler, range)):
            return range(len(self.sampler))
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        with _seeded(self.sampler, self.seed, self.epoch):
            return np.fromiter(self.sampler, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Where in which epoch this is, after all that was given out.

        A DataLoader with workers asks for indices in advance: ``InfiniteDataLoader.state_dict`` knows which were used.
        """
        return {"epoch": self.epoch, "position": self._start + self._given * self.num_replicas, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there, on however many ranks. The position counts for all ranks together.

        Raises:
            DataError: the state is that of another order.
        """
        if {name: state.get(name) for name in self._identity()} != self._identity():
            raise DataError("a state of another order", expected=self._identity(), got=state)
        self.epoch, self._start, self._given = state["epoch"], min(state["position"], state["samples"]), 0

    def _identity(self) -> dict[str, Any]:
        return {"samples": self.num_drawn(), "seed": self.seed, "shuffle": self.shuffle}


def _place_of_rank(mpu: Any) -> tuple[int, int]:
    if mpu is not None:
        return mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


@contextlib.contextmanager
def _seeded(sampler: Any, *seed: int) -> Iterator[None]:
    """All generators that a sampler may draw from begin at the same place, and afterwards are where they were."""
    number = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=4).digest(), "little")
    found = getattr(sampler, "generator", None)
    own = [(found, found.get_state())] if isinstance(found, torch.Generator) else []
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        torch.default_generator.manual_seed(number)
        np.random.seed(number)
        random.seed(number)
        for generator, _ in own:
            generator.manual_seed(number)
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        for generator, state in own:
            generator.set_state(state)
