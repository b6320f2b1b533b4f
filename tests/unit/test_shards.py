"""Who owns which entries: exact order on tensors whose entries are all different."""

from __future__ import annotations

import pytest
import torch

from oslo_engine.errors import PlanError
from oslo_engine.shards import Shard, deal_evenly, deal_features, deal_groups, even_sizes, packed_shard


def test_even_sizes_differ_by_at_most_one() -> None:
    assert even_sizes(9, 2) == (5, 4)
    assert even_sizes(131, 4) == (33, 33, 33, 32)
    assert list(even_sizes(50257, 3)) == [len(part) for part in torch.arange(50257).tensor_split(3)]


@pytest.mark.parametrize(
    ("queries", "groups", "ranks", "expected_queries", "expected_groups"),
    [
        (9, 3, 2, [(0, 6), (6, 9)], [(0, 2), (2, 3)]),
        (9, 3, 3, [(0, 3), (3, 6), (6, 9)], [(0, 1), (1, 2), (2, 3)]),
        (4, 2, 4, [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (8, 1, 3, [(0, 3), (3, 6), (6, 8)], [(0, 1), (0, 1), (0, 1)]),
        (9, 3, 4, [(0, 2), (2, 3), (3, 6), (6, 9)], [(0, 1), (0, 1), (1, 2), (2, 3)]),
        (4, 4, 2, [(0, 2), (2, 4)], [(0, 2), (2, 4)]),
    ],
)
def test_query_heads_stay_with_their_kv_heads(queries, groups, ranks, expected_queries, expected_groups) -> None:
    q, kv = deal_groups(queries, groups, ranks)
    assert [span for (span,) in q.spans] == expected_queries
    assert [span for (span,) in kv.spans] == expected_groups


@pytest.mark.parametrize(("queries", "groups", "ranks"), [(9, 2, 2), (4, 2, 8), (4, 4, 5)])
def test_heads_that_cannot_be_dealt_are_refused(queries: int, groups: int, ranks: int) -> None:
    with pytest.raises(PlanError):
        deal_groups(queries, groups, ranks)


def test_fewer_items_than_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"(?s)fewer features.*at least 4.*tp <= 3"):
        deal_evenly(3, 4, what="features")


def _numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def test_a_packed_weight_is_cut_part_by_part() -> None:
    heads = deal_evenly(4, 2)
    shard = packed_shard(0, [(heads, 3), (heads, 3), (heads, 3)])
    whole = _numbered(36, 2)
    local = shard.apply(whole, 1)
    assert torch.equal(local, torch.cat([whole[6:12], whole[18:24], whole[30:36]]))


def test_parts_of_different_units_are_cut_by_their_own() -> None:
    q, kv = deal_groups(6, 2, 2)
    shard = packed_shard(1, [(q, 2), (kv, 2), (kv, 2)])
    whole = _numbered(3, 20)
    assert torch.equal(shard.apply(whole, 0), torch.cat([whole[:, 0:6], whole[:, 12:14], whole[:, 16:18]], 1))
    assert shard.sizes == (10, 10)


def test_items_in_blocks_are_dealt_block_by_block() -> None:
    heads = deal_evenly(8, 2, blocks=2)
    assert heads.spans == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    assert heads.local(1) == 4
    # q k | q k: each block has a part of each.
    assert packed_shard(0, [(heads, 1), (heads, 1)]).spans[1] == ((2, 4), (6, 8), (10, 12), (14, 16))


@pytest.mark.parametrize(
    ("count", "ranks", "sizes"),
    [
        (52, 2, (24, 28)),
        (52, 3, (16, 16, 20)),
        (11008, 3, (3672, 3672, 3664)),
        (26, 4, (8, 8, 4, 6)),
        (3, 2, (2, 1)),
        (64, 2, (32, 32)),
    ],
)
def test_features_are_dealt_in_multiples_of_eight_where_there_are_enough(
    count: int, ranks: int, sizes: tuple[int, ...]
) -> None:
    deal = deal_features(count, ranks)
    assert sum(deal.sizes) == deal.count == count
    assert deal.sizes == sizes


def test_items_that_do_not_fill_the_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"(?s)do not fill the blocks.*multiple of 4"):
        deal_evenly(6, 1, blocks=4)
    with pytest.raises(PlanError, match=r"(?s)at least 8.*tp <= 1"):
        deal_evenly(4, 2, blocks=4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_undo_is_the_inverse_of_apply(ranks: int, dim: int) -> None:
    q, kv = deal_groups(12, 3, ranks)
    for parts in (
        [(q, 2)],
        [(kv, 4)],
        [(q, 2), (kv, 2), (kv, 2)],
        [(deal_evenly(7, ranks), 1)],
        [(deal_evenly(8, ranks, blocks=2), 3)] * 2,
    ):
        shard = packed_shard(dim, parts)
        shape = [shard.size, 5] if dim == 0 else [5, shard.size]
        whole = torch.randn(shape)
        pieces = [shard.apply(whole, rank) for rank in range(ranks)]
        assert [piece.shape for piece in pieces] == [shard.local_shape(shape, rank) for rank in range(ranks)]
        assert torch.equal(shard.undo(pieces), whole)


def test_a_slice_is_a_copy() -> None:
    shard = packed_shard(0, [(deal_evenly(4, 2), 1)])
    whole = torch.zeros(4)
    shard.apply(whole, 0).fill_(1)
    assert whole.sum() == 0


def test_replicated_entries_are_known() -> None:
    _, kv = deal_groups(4, 2, 4)
    shard = packed_shard(0, [(kv, 8)])
    assert shard.overlaps
    assert shard.shared_spans() == ((0, 8), (8, 16))
    _, kv = deal_groups(9, 3, 4)
    assert packed_shard(0, [(kv, 1)]).shared_spans() == ((0, 1),)
    assert not packed_shard(0, [(deal_evenly(9, 4), 1)]).overlaps


def test_a_shard_is_plain_data() -> None:
    assert Shard(0, 4, (((0, 2),), ((2, 4),))) == packed_shard(0, [(deal_evenly(4, 2), 1)])
