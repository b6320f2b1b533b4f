"""A DataLoader that never ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oslo_engine.data.sampler import DistributedProxySampler
from oslo_engine.errors import DataError


class InfiniteDataLoader:
    """Batches of a DataLoader, epoch after epoch.

    Before each epoch, ``set_epoch`` is called on the sampler and on the data set, where they have it. With a
    ``DistributedProxySampler``, ``state_dict`` says which batches were taken, also with worker processes that read ahead, and
    ``load_state_dict`` goes on there at once, also with another batch size and on another number of ranks.

    Args:
        dataloader: a ``torch.utils.data.DataLoader``, or anything that can be iterated over again and again.

    Raises:
        DataError: when it is asked for a batch and an epoch has none; when ranks would come to the end of an epoch at different
            batches.
    """

    def __init__(self, dataloader: Any) -> None:
        self.dataloader = dataloader
        batch_sampler = getattr(dataloader, "batch_sampler", None)
        self._sampler = getattr(batch_sampler, "sampler", None) or getattr(dataloader, "sampler", None)
        self.epoch, self._from = 0, 0  # the epoch, and where in it this began, in samples of all ranks together
        if isinstance(self._sampler, DistributedProxySampler):
            self.epoch, self._from = self._sampler.epoch, self._sampler.state_dict()["position"]
        self._batches: Iterator[Any] | None = None
        self._num_taken = 0  # batches since then

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.dataloader)

    def __iter__(self) -> InfiniteDataLoader:
        return self

    def __next__(self) -> Any:
        while True:
            if self._batches is None:
                self._begin()
            assert self._batches is not None
            try:
                batch = next(self._batches)
            except StopIteration:
                self._end()
                continue
            self._num_taken += 1
            return batch

    def _begin(self) -> None:
        for part in (self._sampler, getattr(self.dataloader, "dataset", None)):
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(self.epoch)
        sampler = self._sampler
        if isinstance(sampler, DistributedProxySampler) and sampler.num_left() % sampler.num_replicas:
            raise DataError(
                "ranks would come to the end of an epoch at different batches",
                expected=f"a multiple of {sampler.num_replicas} samples",
                got=sampler.num_left(),
                hint="DistributedProxySampler(..., drop_last=True)",
            )
        self._batches = iter(self.dataloader)

    def _end(self) -> None:
        if not self._num_taken and not self._from:
            raise DataError(
                "a data loader has no batches",
                where=type(self.dataloader).__name__,
                hint="its data set is empty, or smaller than one batch and drop_last leaves that out",
            )
        self.epoch += 1
        self._batches, self._num_taken, self._from = None, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many samples of it all ranks together have used.

        Raises:
            DataError: the sampler cannot say or go on there.
        """
        sampler, size = self._seekable(), getattr(self.dataloader.batch_sampler, "batch_size", None)
        if size is None:
            raise DataError("the size of a batch is not known", where=type(self.dataloader.batch_sampler).__name__)
        position = self._from + self._num_taken * size * sampler.num_replicas
        return sampler.state_dict() | {"epoch": self.epoch, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there; the next batch is the one that would have come."""
        self._seekable().load_state_dict(state)
        self.epoch, self._from = state["epoch"], state["position"]
        self._batches, self._num_taken = None, 0

    def _seekable(self) -> DistributedProxySampler:
        if not isinstance(self._sampler, DistributedProxySampler):
            raise DataError(
                "this sampler cannot go on in the middle of an epoch",
                expected="a DistributedProxySampler, for any number of ranks",
                got=type(self._sampler).__name__,
                hint="DataLoader(..., sampler=DistributedProxySampler(SequentialSampler(dataset), shuffle=True))",
            )
        return self._sampler
