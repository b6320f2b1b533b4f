"""Slice algebra: which entries of a tensor each tp rank holds, in global coordinates, with an inverse.

Every layout is the same thing here: along one dimension, each rank owns an ordered list of half-open spans. A tensor's shard is
what training, checkpointing, verification and gradient norms all read, so there is one definition of who owns what.

    contiguous   AAABBB            -> [AAA, BBB]
    uneven       AAAAABBBB         -> [AAAAA, BBBB]
    packed       qqqq kkkk vvvv    -> [qq kk vv, qq kk vv]
    replicated   kk (2 KV heads)   -> [k0, k0, k1, k1]          more ranks than KV heads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oslo_engine.errors import PlanError

Span = tuple[int, int]


def even_sizes(count: int, ranks: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, larger ones first: ``even_sizes(9, 2) == (5, 4)``."""
    return tuple(count // ranks + (rank < count % ranks) for rank in range(ranks))


@dataclass(frozen=True)
class Deal:
    """How the items of one unit (heads, KV heads, features, vocabulary) are dealt to the tp ranks.

    ``spans[rank]`` are the items of that rank. Spans of two ranks are disjoint, or equal where an item is replicated.
    """

    count: int
    spans: tuple[Span, ...]

    def local(self, rank: int) -> int:
        start, stop = self.spans[rank]
        return stop - start


def deal_evenly(count: int, ranks: int, *, what: str = "items") -> Deal:
    """Deal ``count`` items contiguously; sizes may differ by one.

    Raises:
        PlanError: there are fewer items than ranks.
    """
    if count < ranks:
        raise PlanError(
            f"there are fewer {what} than tensor-parallel ranks",
            where=what,
            expected=f"at least {ranks}",
            got=str(count),
            hint=f"use tp <= {count}",
        )
    return _from_sizes(count, even_sizes(count, ranks))


def deal_groups(queries: int, groups: int, ranks: int, *, what: str = "heads") -> tuple[Deal, Deal]:
    """Deal query heads and the KV heads they share (GQA, MQA) so that each rank's queries find their KV heads on that rank.

    Up to ``groups`` ranks, whole groups are dealt. Beyond, ranks share a KV head: it is replicated and its queries are dealt.

        9 queries, 3 KV heads, 2 ranks:  queries [0-5, 6-8],           KV [0-1, 2]
        4 queries, 2 KV heads, 4 ranks:  queries [0, 1, 2, 3],         KV [0, 0, 1, 1]

    Returns:
        (queries, KV heads)

    Raises:
        PlanError: queries are no multiple of groups, or some rank would get no query head.
    """
    if groups < 1 or queries % groups:
        raise PlanError(
            "query heads must be a multiple of KV heads", where=what, expected=f"a multiple of {groups}", got=str(queries)
        )
    per_group = queries // groups
    if ranks <= groups:
        kv = deal_evenly(groups, ranks, what=what)
        return Deal(queries, tuple((start * per_group, stop * per_group) for start, stop in kv.spans)), kv
    query_spans: list[Span] = []
    kv_spans: list[Span] = []
    for group, sharers in enumerate(even_sizes(ranks, groups)):
        if per_group < sharers:
            raise PlanError(
                "there are fewer query heads than tensor-parallel ranks",
                where=what,
                expected=f"tp <= {queries}, at most {per_group} ranks for each of {groups} KV heads",
                got=f"tp={ranks}",
            )
        start = group * per_group
        for size in even_sizes(per_group, sharers):
            query_spans.append((start, start + size))
            kv_spans.append((group, group + 1))
            start += size
    return Deal(queries, tuple(query_spans)), Deal(groups, tuple(kv_spans))


def _from_sizes(count: int, sizes: Sequence[int]) -> Deal:
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return Deal(count, tuple((start, start + size) for start, size in zip(starts, sizes, strict=True)))


@dataclass(frozen=True)
class Shard:
    """The spans of each tp rank along ``dim`` of a tensor whose whole size there is ``size``."""

    dim: int
    size: int
    spans: tuple[tuple[Span, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.spans)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)

    @property
    def overlaps(self) -> bool:
        """Whether some entries are held by more than one rank (replicated KV heads)."""
        return sum(self.sizes) != self.size

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        return tuple(self.sizes[rank] if dim == self.dim else size for dim, size in enumerate(shape))

    def apply(self, whole: Tensor, rank: int) -> Tensor:
        """Cut one rank's slice out of the whole tensor, as a contiguous copy. Inverse: ``undo``."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.spans[rank]]
        return torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)

    def undo(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the ranks' slices together; where ranks overlap, the first one's entries are taken. Inverse: ``apply``."""
        whole = parts[0].new_empty(*(self.size if dim == self.dim else size for dim, size in enumerate(parts[0].shape)))
        for rank in reversed(range(self.num_ranks)):
            at = 0
            for start, stop in self.spans[rank]:
                whole.narrow(self.dim, start, stop - start).copy_(parts[rank].narrow(self.dim, at, stop - start))
                at += stop - start
        return whole

    def shared_spans(self) -> tuple[Span, ...]:
        """The spans that more than one rank holds, in order and without repeats."""
        seen: set[Span] = set()
        shared: set[Span] = set()
        for spans in self.spans:
            for span in spans:
                (shared if span in seen else seen).add(span)
        return tuple(sorted(shared))


def packed_shard(dim: int, parts: Sequence[tuple[Deal, int]]) -> Shard:
    """Shard a weight made of parts laid one after another, each dealt by its own unit.

        q|k|v with 2 ranks:   Q0 Q1 | K0 K1 | V0 V1  ->  [Q0 K0 V0, Q1 K1 V1]

    Args:
        dim: the dimension that is cut.
        parts: for each part its deal and the number of entries per item (``head_dim`` for heads, 1 for features).
    """
    num_ranks = len(parts[0][0].spans)
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    offset = 0
    for deal, width in parts:
        for rank, (start, stop) in enumerate(deal.spans):
            if stop > start:
                spans[rank].append((offset + start * width, offset + stop * width))
        offset += deal.count * width
    return Shard(dim, offset, tuple(tuple(rank_spans) for rank_spans in spans))
