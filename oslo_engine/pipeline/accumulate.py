"""Sums of gradients that autograd has handed out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class GradientBuffer:
    """Adds up the gradients of a batch, one sum per parameter, outside of ``parameter.grad``.

    What ``torch.autograd.grad`` returns may be shared by two parameters or be an expanded view, so it is never written to: the
    first gradient is kept as it is, the second makes a sum of our own, later ones are added in place.
    """

    def __init__(self, size: int) -> None:
        self._sums: list[Tensor | None] = [None] * size
        self._own = [False] * size

    def add(self, index: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        total = self._sums[index]
        if total is None:
            self._sums[index] = gradient
        elif self._own[index]:
            total.add_(gradient)
        else:
            self._sums[index], self._own[index] = total + gradient, True

    def add_all(self, gradients: Sequence[Tensor | None]) -> None:
        for index, gradient in enumerate(gradients):
            self.add(index, gradient)

    def take(self) -> list[Tensor | None]:
        """The sums, each in memory of its own; the buffer is empty afterwards."""
        sums: list[Tensor | None] = []
        for index, total in enumerate(self._sums):
            self._sums[index] = None
            sums.append(total if total is None or self._own[index] else total.clone())
            self._own[index] = False
        return sums
