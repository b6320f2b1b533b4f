"""Where logits come together while ``generate`` runs under tensor parallelism, where every rank computes a slice of them.

What follows the head needs whole rows of logits on the rank that chooses, and nowhere else: the other ranks hand their slices
to it and go on with zeros. Plain greedy decoding does not need even that. The largest of a row is the largest of what is
largest in each slice, so two numbers a row are exchanged, where the logits are what the head computed and nothing else. That is
seen, bit by bit, in the first step, and looked at again in every other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.comm.collectives import Axis, all_gather
from oslo_engine.layers.vocabulary import LogitsPlace, VocabParallelHead


class Heads:
    """The vocabulary-parallel heads of a model, during one ``generate``.

    Args:
        computes: whether this rank is one of the last stage, whose heads compute.
    """

    def __init__(self, model: Any, axis: Axis, *, computes: bool) -> None:
        self._heads = [module for module in model.modules() if isinstance(module, VocabParallelHead)]
        self._axis, self._computes = axis, computes
        self._before = [head.logits_place for head in self._heads]

    def restore(self) -> None:
        for head, place in zip(self._heads, self._before, strict=True):
            head.logits_place, head.last_rows = place, None

    def put_logits(self, place: LogitsPlace) -> None:
        for head in self._heads:
            head.logits_place, head.last_rows = place, None

    @property
    def single(self) -> bool:
        return len(self._heads) == 1

    def untouched(self, scores: Tensor) -> bool:
        """Whether scores [rows, vocabulary] are bit for bit what the head computed last, as far as it was whole here."""
        head = self._heads[0]
        rows = None if head.last_rows is None else head.last_rows.to(scores.dtype)
        if head.logits_place == "nowhere":
            scores = head.vocab.narrow(scores) if scores.shape[-1] == head.vocab.total else scores
        return rows is not None and rows.shape == scores.shape and torch.equal(_bits(rows), _bits(scores))

    def choose(self, scores: Tensor) -> Tensor:
        """The most likely token of each row, from the slices of all ranks; of equal ones the first, as ``argmax`` has it.

        Args:
            scores: [rows, vocabulary], right in this rank's slice.

        Returns:
            [rows, 1], the same on every tp rank of the last stage: ids, or -1 where on any rank the logits are not what the
            head computed any more. Zeros on other stages, which are told.

        Communication: one all-gather of [rows + 1, 2] numbers of 8 bytes on tp.
        """
        rows = scores.shape[0]
        if not self._computes:
            return torch.zeros(rows, 1, dtype=torch.int64, device=scores.device)
        vocab = self._heads[0].vocab
        untouched = self.untouched(scores)
        message = torch.zeros(rows + 1, 2, dtype=torch.float64, device=scores.device)
        message[rows, 0] = float(untouched)
        if untouched:
            own = vocab.narrow(scores)
            at = own.argmax(-1, keepdim=True)
            message[:rows] = torch.cat([own.gather(-1, at).double(), (at + vocab.start).double()], dim=-1)
        told = all_gather(message[None], self._axis, 0, [1] * self._axis.size)
        ids = told[:, :rows, 1].gather(0, told[:, :rows, 0].argmax(0, keepdim=True)).long().view(rows, 1)
        return torch.where(told[:, rows, 0].all(), ids, -1)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
