"""Ranks, coordinates and groups on the three axes."""

from __future__ import annotations

import pytest

from oslo_engine.errors import TopologyError
from oslo_engine.topology import Coordinate, Topology


def test_tp_is_innermost_then_dp_then_pp() -> None:
    topology = Topology(tp=2, pp=2, dp=3)
    assert [topology.coordinate(rank) for rank in (0, 1, 2, 5, 6, 11)] == [
        Coordinate(0, 0, 0),
        Coordinate(0, 0, 1),
        Coordinate(0, 1, 0),
        Coordinate(0, 2, 1),
        Coordinate(1, 0, 0),
        Coordinate(1, 2, 1),
    ]


def test_rank_is_the_inverse_of_coordinate() -> None:
    topology = Topology(tp=3, pp=2, dp=2)
    for rank in range(topology.world_size):
        at = topology.coordinate(rank)
        assert topology.rank(pp_rank=at.pp_rank, dp_rank=at.dp_rank, tp_rank=at.tp_rank) == rank


def test_groups_by_axis() -> None:
    topology = Topology(tp=2, pp=2, dp=2)
    assert topology.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.groups("pp", "tp") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_what_is_left_of_the_world_is_data_parallel() -> None:
    assert Topology.from_world(16, tp=2, pp=2) == Topology(tp=2, pp=2, dp=4)


def test_a_world_that_does_not_fit_names_the_three_numbers() -> None:
    with pytest.raises(TopologyError, match=r"(?s)tp=2, pp=3, world size=8.*multiple of 6.*nproc-per-node=6"):
        Topology.from_world(8, tp=2, pp=3)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_sizes_must_be_positive_integers(size: object) -> None:
    with pytest.raises(TopologyError, match="the tp size must be a positive integer"):
        Topology(tp=size)  # type: ignore[arg-type]


def test_a_rank_outside_the_world_is_an_error() -> None:
    with pytest.raises(TopologyError, match="outside the world"):
        Topology(tp=2).coordinate(2)
