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
from itertools import accumulate

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

    ``spans[rank]`` are the items of that rank, ascending. Spans of two ranks are disjoint, or equal where an item is
    replicated. ``blocks``: the items lie in that many equal blocks, each dealt by itself.
    """

    count: int
    spans: tuple[tuple[Span, ...], ...]
    blocks: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)

    def local(self, rank: int) -> int:
        return self.sizes[rank]


def deal_evenly(count: int, ranks: int, *, blocks: int = 1, what: str = "items") -> Deal:
    """Deal ``count`` items contiguously; sizes may differ by one.

        9 items, 2 ranks:            [0-4, 5-8]
        8 items, 2 ranks, 2 blocks:  [0-1 4-5, 2-3 6-7]

    Raises:
        PlanError: there are fewer items than ranks, or they do not fill the blocks.
    """
    if count % blocks:
        raise PlanError(f"{what} do not fill the blocks", where=what, expected=f"a multiple of {blocks}", got=str(count))
    if count // blocks < ranks:
        raise PlanError(
            f"there are fewer {what} than tensor-parallel ranks",
            where=what,
            expected=f"at least {ranks * blocks}",
            got=str(count),
            hint=f"use tp <= {count // blocks}",
        )
    runs = _runs(even_sizes(count // blocks, ranks))
    width = count // blocks
    return Deal(count, tuple(tuple((at + start, at + stop) for at in range(0, count, width)) for start, stop in runs), blocks)


def deal_features(count: int, ranks: int) -> Deal:
    """Deal single features, in multiples of 8 as far as that leaves none to no rank: matrix products want 16-byte rows.

        52 features, 2 ranks: [0-23, 24-51]

    Raises:
        PlanError: there are fewer features than ranks.
    """
    step = next((step for step in (8, 4, 2) if count >= step * ranks), 1)
    sizes = [size * step for size in deal_evenly(count // step, ranks, what="features").sizes]
    sizes[-1] += count % step
    return Deal(count, tuple((span,) for span in _runs(sizes)))


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
        return Deal(queries, tuple(((start * per_group, stop * per_group),) for ((start, stop),) in kv.spans)), kv
    query_spans: list[tuple[Span, ...]] = []
    kv_spans: list[tuple[Span, ...]] = []
    for group, sharers in enumerate(even_sizes(ranks, groups)):
        if per_group < sharers:
            raise PlanError(
                "there are fewer query heads than tensor-parallel ranks",
                where=what,
                expected=f"tp <= {queries}, at most {per_group} ranks for each of {groups} KV heads",
                got=f"tp={ranks}",
            )
        for start, stop in _runs(even_sizes(per_group, sharers)):
            query_spans.append(((group * per_group + start, group * per_group + stop),))
            kv_spans.append(((group, group + 1),))
    return Deal(queries, tuple(query_spans)), Deal(groups, tuple(kv_spans))


def _runs(sizes: Sequence[int]) -> list[Span]:
    """Spans of these sizes, one after another."""
    stops = list(accumulate(sizes))
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


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

        q|k|v with 2 ranks:               Q0 Q1 | K0 K1 | V0 V1            ->  [Q0 K0 V0, Q1 K1 V1]
        the same, heads in 2 blocks:      Q0 Q1 | K0 K1 || Q2 Q3 | K2 K3   ->  [Q0 K0 Q2 K2, Q1 K1 Q3 K3]

    Args:
        dim: the dimension that is cut.
        parts: for each part its deal and the number of entries per item (``head_dim`` for heads, 1 for features). All deals
            have the same number of blocks: the layout is repeated in each.
    """
    num_ranks, blocks = len(parts[0][0].spans), parts[0][0].blocks
    assert all(deal.blocks == blocks for deal, _ in parts)
    spans: list[list[Span]] = [[] for _ in range(num_ranks)]
    offset = 0
    for block in range(blocks):
        for deal, width in parts:
            items = deal.count // blocks
            first = block * items
            for rank, runs in enumerate(deal.spans):
                for start, stop in runs:
                    start, stop = max(start, first), min(stop, first + items)
                    if stop > start:
                        spans[rank].append((offset + (start - first) * width, offset + (stop - first) * width))
            offset += items * width
    return Shard(dim, offset, tuple(tuple(rank_spans) for rank_spans in spans))
