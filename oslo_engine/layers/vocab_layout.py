"""Which rows of the vocabulary a tp rank owns, and where a token id lies among them. Arithmetic only: no communication."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from oslo_engine.comm.collectives import Axis


@dataclass(frozen=True)
class VocabLayout:
    """A vocabulary cut into one contiguous slice per rank.

    vocabulary 131, tp=3:  ids 0..43 | 44..87 | 88..130   sizes (44, 44, 43)

    Args:
        axis: the tp axis that the slices lie on.
        sizes: entries per rank, uneven where tp does not divide the vocabulary; a slice may be empty.
        dim: dimension of the vocabulary in the tensor described, counted from the end (negative).
    """

    axis: Axis
    sizes: tuple[int, ...]
    dim: int = -1

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.axis.rank])

    @property
    def length(self) -> int:
        return self.sizes[self.axis.rank]

    @property
    def stop(self) -> int:
        return self.start + self.length

    def at_dim(self, dim: int) -> VocabLayout:
        return replace(self, dim=dim)

    def cut(self, start: int, stop: int) -> VocabLayout:
        """The layout of ``vocabulary[start:stop]``: every rank keeps what it has of it."""
        sizes, first = [], 0
        for size in self.sizes:
            sizes.append(max(0, min(first + size, stop) - max(first, start)))
            first += size
        return replace(self, sizes=tuple(sizes))

    def narrow(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that has the whole vocabulary at ``dim``. A view."""
        return whole.narrow(self.dim, self.start, self.length)

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Turn global ids into rows of this rank's slice.

        Returns:
            ``(rows, inside)``, both of the shape of ``ids``: rows to read, 0 where the id belongs to another rank; and whether
            it belongs to this one.
        """
        inside = (ids >= self.start) & (ids < self.stop)
        return torch.where(inside, ids - self.start, 0), inside

    def __str__(self) -> str:
        return f"{self.start}:{self.stop} of {self.total} on {self.axis.name} rank {self.axis.rank} of {self.axis.size}"


def check_ids(ids: Tensor, total: int, *, what: str, used: Tensor | None = None) -> None:
    """Refuse ids outside the vocabulary, which no rank would own and which would pass for a zero.

    Ids are replicated, so every rank raises. On a GPU the check is a device-side assert, as in torch's own kernels: the host
    does not wait for it.

    Args:
        ids: token ids, any shape.
        total: size of the whole vocabulary.
        what: what the ids are, for the message: "token id".
        used: mask of the ids that count; None for all.

    Raises:
        IndexError: as ``nn.Embedding`` and ``cross_entropy`` do.
    """
    wrong = (ids < 0) | (ids >= total)
    if used is not None:
        wrong = wrong & used
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or is_fake(ids):
        if ids.device.type != "meta":
            torch._assert_async(~wrong.any(), f"{what} out of range for a vocabulary of {total}")
    elif bool(wrong.any()):
        raise IndexError(f"{what} {int(ids[wrong][0])} is out of range for a vocabulary of {total}")
