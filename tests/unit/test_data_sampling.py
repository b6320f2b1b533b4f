"""Shuffles, blends, samplers and endless loaders: proportions, exact partitions, and going on where a run stopped."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from oslo_engine import DataError, DatasetBlender, DistributedProxySampler, InfiniteDataLoader
from oslo_engine.data.blend import Schedule
from oslo_engine.data.shuffle import Permutation

# -- shuffles


@given(size=st.integers(1, 3000), seed=st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_permutation_has_every_item_once(size: int, seed: int) -> None:
    order = Permutation(size, seed).of(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))
    assert [Permutation(size, seed).at(at) for at in range(0, size, 97)] == order[::97].tolist()


def test_permutation_is_the_same_for_ever() -> None:
    """Stored positions are worth nothing if a later version orders differently."""
    assert Permutation(10, 0, "a").of(np.arange(10)).tolist() == [8, 0, 1, 3, 7, 4, 2, 9, 6, 5]


def test_permutations_of_other_seeds_differ_and_look_random() -> None:
    orders = np.array([Permutation(1000, seed).of(np.arange(1000)) for seed in range(200)])
    assert len({tuple(order) for order in orders}) == 200
    # Each item's mean place is that of a uniform draw, within 5 standard deviations of a mean of 200.
    assert np.abs(orders.mean(axis=0) - 499.5).max() < 5 * 288.7 / 200**0.5
    correlations = [np.corrcoef(order[:-1], order[1:])[0, 1] for order in orders]
    assert abs(np.mean(correlations)) < 5 / (1000 * 200) ** 0.5


# -- blends


class Numbers(torch.utils.data.Dataset[Any]):
    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> tuple[str, int]:
        assert 0 <= at < self.size
        return self.name, at


@given(parts=st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any), places=st.integers(1, 500))
@settings(max_examples=150, deadline=None)
def test_blend_keeps_to_its_weights_within_one_at_every_prefix(parts: list[int], places: int) -> None:
    schedule = Schedule([Fraction(part) for part in parts], places)
    counts = [0] * len(parts)
    for place in range(places):
        number, before = schedule.at(place)
        assert before == counts[number]
        counts[number] += 1
        for count, part in zip(counts, parts, strict=True):
            assert abs(count - Fraction(part * (place + 1), sum(parts))) < 1
            assert part or not count


def test_blend_repeats_exactly_after_its_period() -> None:
    schedule = Schedule([Fraction("0.7"), Fraction("0.2"), Fraction("0.1")], 10**6)
    assert schedule.period == 10
    assert Counter(schedule.at(place)[0] for place in range(1000)) == {0: 700, 1: 200, 2: 100}
    for place in range(10):
        number, before = schedule.at(place)
        assert schedule.at(10**15 + place) == (number, before + (7, 2, 1)[number] * 10**14)


def test_proportional_blend_has_every_item_once_in_each_epoch() -> None:
    sets = [Numbers("a", 50), Numbers("b", 7), Numbers("c", 1), Numbers("d", 23)]
    blend = DatasetBlender(sets)
    assert len(blend) == 81
    orders = []
    for epoch in range(3):
        blend.set_epoch(epoch)
        found = [blend[at] for at in range(len(blend))]
        assert sorted(found) == sorted((each.name, at) for each in sets for at in range(each.size))
        orders.append(found)
    assert orders[0] != orders[1] != orders[2]


def test_a_set_with_a_large_weight_is_used_again_in_a_fresh_order() -> None:
    blend = DatasetBlender([Numbers("a", 5), Numbers("b", 1000)], [3, 1], num_samples=40)
    found = [at for name, at in (blend[place] for place in range(40)) if name == "a"]
    passes = [found[start : start + 5] for start in range(0, 30, 5)]
    assert all(sorted(each) == list(range(5)) for each in passes)
    assert len({tuple(each) for each in passes}) > 1


def test_epochs_of_a_blend_go_on_in_sets_that_are_used_little() -> None:
    blend = DatasetBlender([Numbers("a", 100), Numbers("b", 100)], [1, 9], num_samples=100)
    found = []
    for epoch in range(10):
        blend.set_epoch(epoch)
        found += [at for name, at in (blend[place] for place in range(100)) if name == "a"]
    assert sorted(found) == list(range(100))


def test_weight_zero_leaves_a_set_out_even_an_empty_one() -> None:
    blend = DatasetBlender([Numbers("a", 4), Numbers("b", 0), Numbers("c", 6)], [0.5, 0, 0.5])
    assert len(blend) == 10
    assert Counter(blend[at][0] for at in range(10)) == {"a": 5, "c": 5}
    assert blend.weights == [0.5, 0, 0.5]


@pytest.mark.parametrize(
    ("sizes", "weights", "complaint"),
    [
        ([], None, "nothing to blend"),
        ([3, 3], [0, 0], "nothing to blend"),
        ([0, 0], None, "nothing to blend"),
        ([3, 3], [1], "a weight for each"),
        ([3, 3], [1, -1], "not negative"),
        ([3, 3], [1, float("nan")], "not negative"),
        ([3, 0], [1, 1], "empty data set"),
    ],
    ids=str,
)
def test_a_blend_that_cannot_be_is_refused(sizes: list[int], weights: list[float] | None, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        DatasetBlender([Numbers(str(size), size) for size in sizes], weights)


def test_state_of_a_blend_comes_back_and_fits_only_the_same_blend() -> None:
    sets = [Numbers("a", 50), Numbers("b", 7)]
    blend, other = DatasetBlender(sets, [1, 2]), DatasetBlender(sets, [1, 2])
    blend.set_epoch(4)
    other.load_state_dict(blend.state_dict())
    assert [other[at] for at in range(57)] == [blend[at] for at in range(57)]
    with pytest.raises(DataError, match="another blend"):
        DatasetBlender(sets, [2, 1]).load_state_dict(blend.state_dict())


# -- samplers


def draw(sampler: Any, ranks: int, **options: Any) -> list[list[int]]:
    """What each rank gets, whose random seeds differ."""
    found = []
    for rank in range(ranks):
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        found.append(list(DistributedProxySampler(sampler, ranks, rank, **options)))
    return found


class PythonRandom:
    """A sampler that draws from Python's and numpy's generators, and has no length."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(50), 20)
        yield from np.random.permutation(50).tolist()


SAMPLERS = {
    "sequential": (lambda: SequentialSampler(range(23)), Counter(range(23))),
    "random": (lambda: RandomSampler(range(23)), Counter(range(23))),
    "own generator": (lambda: RandomSampler(range(23), generator=torch.Generator()), Counter(range(23))),
    "replacement": (lambda: RandomSampler(range(10), replacement=True, num_samples=40), None),
    "weighted": (lambda: WeightedRandomSampler([1.0, 0.0, 3.0], 30), None),
    "python": (PythonRandom, None),
}


@pytest.mark.parametrize(("make", "expected"), SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_partition_what_any_sampler_draws(make: Any, expected: Counter[int] | None, shuffle: bool) -> None:
    (whole,) = draw(make(), 1, shuffle=shuffle)
    assert expected in (None, Counter(whole))
    for ranks in (2, 3, 5):
        parts = draw(make(), ranks, shuffle=shuffle)
        assert [parts[at % ranks][at // ranks] for at in range(len(whole))] == whole
        assert sum(map(len, parts)) == len(whole)


def test_drawing_leaves_the_random_generators_as_they_were() -> None:
    generator = torch.Generator().manual_seed(5)
    before = torch.get_rng_state(), generator.get_state(), random.getstate()
    list(DistributedProxySampler(RandomSampler(range(9), generator=generator), 2, 0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(generator.get_state(), before[1])
    assert random.getstate() == before[2]


@given(size=st.integers(0, 200), ranks=st.integers(1, 9), shuffle=st.booleans(), drop=st.booleans(), epoch=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_partition_is_exact_for_any_number_of_ranks(size: int, ranks: int, shuffle: bool, drop: bool, epoch: int) -> None:
    parts = []
    for rank in range(ranks):
        sampler = DistributedProxySampler(SequentialSampler(range(size)), ranks, rank, shuffle, drop_last=drop)
        sampler.set_epoch(epoch)
        expected = len(sampler)
        parts.append(list(sampler))
        assert len(parts[-1]) == expected
    found = sorted(index for part in parts for index in part)
    if drop:
        assert {len(part) for part in parts} == {size // ranks}
        assert len(set(found)) == len(found) == size // ranks * ranks
        assert set(found) <= set(range(size))
    else:
        assert found == list(range(size))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_each_epoch_has_another_order_also_without_set_epoch() -> None:
    sampler = DistributedProxySampler(SequentialSampler(range(50)), 1, 0)
    orders = [list(sampler) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]
    sampler.set_epoch(1)
    assert list(sampler) == orders[1]
    unshuffled = DistributedProxySampler(SequentialSampler(range(50)), 1, 0, shuffle=False)
    assert list(unshuffled) == list(unshuffled) == list(range(50))


@given(
    size=st.integers(1, 120),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    steps=st.integers(0, 20),
    shuffle=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_the_rest_of_an_epoch_is_the_same_on_another_number_of_ranks(
    size: int, before: int, after: int, steps: int, shuffle: bool
) -> None:
    steps = min(steps, size // before)
    whole = list(DistributedProxySampler(SequentialSampler(range(size)), 1, 0, shuffle))
    sampler = DistributedProxySampler(SequentialSampler(range(size)), before, before - 1, shuffle)
    indices = iter(sampler)
    for _ in range(steps):
        next(indices)
    state = sampler.state_dict()
    parts = []
    for rank in range(after):
        resumed = DistributedProxySampler(SequentialSampler(range(size)), after, rank, shuffle)
        resumed.load_state_dict(state)
        assert len(resumed) == len(range(rank, size - steps * before, after))
        parts.append(list(resumed))
    rest = whole[steps * before :]
    assert [parts[at % after][at // after] for at in range(len(rest))] == rest


def test_ranks_that_share_a_copy_of_the_model_get_the_same() -> None:
    def mpu(dp: int) -> Any:
        return SimpleNamespace(get_data_parallel_world_size=lambda: 2, get_data_parallel_rank=lambda: dp)

    parts = [list(DistributedProxySampler(RandomSampler(range(10)), mpu=mpu(dp))) for dp in (0, 0, 1, 1)]
    assert parts[0] == parts[1]
    assert parts[2] == parts[3]
    assert sorted(parts[0] + parts[2]) == list(range(10))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_replicas": 2, "rank": 2}, "no such rank"),
        ({"num_replicas": 0, "rank": 0}, "no such rank"),
        ({"num_replicas": 2, "rank": -1}, "no such rank"),
        ({"rank": 0, "mpu": object()}, "twice"),
    ],
    ids=str,
)
def test_ranks_that_cannot_be_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        DistributedProxySampler(SequentialSampler(range(9)), **options)


@pytest.mark.parametrize(("size", "options"), [(10, {}), (9, {"seed": 1}), (9, {"shuffle": False})], ids=str)
def test_a_state_of_another_order_is_refused(size: int, options: dict[str, Any]) -> None:
    state = DistributedProxySampler(SequentialSampler(range(9)), 1, 0).state_dict()
    with pytest.raises(DataError, match="another order"):
        DistributedProxySampler(SequentialSampler(range(size)), 1, 0, **options).load_state_dict(state)


# -- endless loaders


def endless(size: int, batch: int, ranks: int = 1, rank: int = 0, workers: int = 0, **options: Any) -> InfiniteDataLoader:
    data = Numbers("a", size)
    sampler = DistributedProxySampler(SequentialSampler(data), ranks, rank, drop_last=ranks > 1, **options)
    return InfiniteDataLoader(DataLoader(data, batch, sampler=sampler, num_workers=workers, collate_fn=indices_of))


def indices_of(items: list[tuple[str, int]]) -> list[int]:
    return [at for _, at in items]


def test_epochs_follow_one_another_each_in_its_order() -> None:
    loader = endless(10, 4)
    batches = [next(loader) for _ in range(9)]
    assert [len(batch) for batch in batches] == [4, 4, 2] * 3
    epochs = [sum(batches[at : at + 3], []) for at in (0, 3, 6)]  # noqa: RUF017
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(loader) == 3


def test_set_epoch_is_called_on_sampler_and_data_set() -> None:
    called: list[tuple[str, int]] = []

    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            called.append(("data", epoch))

    class ToldSampler(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            called.append(("sampler", epoch))

    data = Told("a", 4)
    loader = InfiniteDataLoader(DataLoader(data, 2, sampler=ToldSampler(data), collate_fn=indices_of))
    assert [next(loader) for _ in range(5)] == [[0, 1], [2, 3]] * 2 + [[0, 1]]
    assert called == [(who, epoch) for epoch in range(3) for who in ("sampler", "data")]


@pytest.mark.parametrize(
    "loader",
    [DataLoader(Numbers("a", 3), 4, drop_last=True), DataLoader([], 2), []],
    ids=["smaller than a batch", "empty", "list"],
)
def test_an_empty_loader_is_an_error_and_not_a_hang(loader: Any) -> None:
    with pytest.raises(DataError, match="no batches"):
        next(InfiniteDataLoader(loader))


def test_any_loader_can_be_repeated() -> None:
    assert [next(loader) for loader in [InfiniteDataLoader([1, 2])] for _ in range(5)] == [1, 2, 1, 2, 1]


def test_ranks_that_would_drift_apart_are_refused() -> None:
    sampler = DistributedProxySampler(SequentialSampler(range(9)), 2, 0)
    with pytest.raises(DataError, match="drop_last=True"):
        next(InfiniteDataLoader(DataLoader(Numbers("a", 9), 2, sampler=sampler)))


def test_a_loader_that_cannot_go_on_says_so() -> None:
    loader = InfiniteDataLoader(DataLoader(Numbers("a", 9), 2, shuffle=True))
    with pytest.raises(DataError, match="RandomSampler"):
        loader.state_dict()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("taken", [0, 1, 4, 5, 7])
def test_a_loader_goes_on_with_the_next_batch(workers: int, taken: int) -> None:
    loader = endless(20, 4, workers=workers)
    for _ in range(taken):
        next(loader)
    resumed = endless(20, 4)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict() == loader.state_dict()
    assert [next(resumed) for _ in range(8)] == [next(loader) for _ in range(8)]


def test_a_state_survives_saving_twice() -> None:
    loader = endless(20, 4)
    next(loader)
    resumed = endless(20, 4)
    resumed.load_state_dict(loader.state_dict())
    next(resumed)
    again = endless(20, 4)
    again.load_state_dict(resumed.state_dict())
    next(loader)
    assert [next(again) for _ in range(8)] == [next(loader) for _ in range(8)]


@pytest.mark.parametrize(("ranks", "batch"), [(1, 3), (2, 4), (3, 2), (4, 6)])
def test_other_ranks_and_batches_take_the_rest_of_the_epoch_in_its_order(ranks: int, batch: int) -> None:
    size, whole = 96, [next(loader) for loader in [endless(96, 1)] for _ in range(96)]
    loader = endless(size, 6, ranks=4, rank=1)
    for _ in range(2):
        next(loader)  # 48 samples of all ranks
    rest = []
    loaders = [endless(size, batch, ranks, rank) for rank in range(ranks)]
    for each in loaders:
        each.load_state_dict(loader.state_dict())
    for _ in range(48 // (ranks * batch)):
        batches = [next(each) for each in loaders]
        rest += [batches[rank][at] for at in range(batch) for rank in range(ranks)]
    assert rest == [index for (index,) in whole[48:]]


def test_going_on_after_200_000_batches_costs_next_to_nothing() -> None:
    """Positions are looked up, not replayed: within the time that is allowed a replay gets nowhere near."""
    ranks, batch = 4, 8
    used = 200_000 * ranks * batch
    size = used + 1003
    order = Permutation(size, "sampler", 0, 0)
    resumed = [endless(size, 16, 3, rank) for rank in range(3)]
    state = endless(size, batch, ranks).state_dict() | {"position": used}
    begun = time.process_time()
    for loader in resumed:
        loader.load_state_dict(state)
    batches = [next(loader) for loader in resumed]
    assert time.process_time() - begun < 0.3  # 0.1 for each
    for rank, loader in enumerate(resumed):
        found = batches[rank] + [index for _ in range(len(range(rank, 1002, 3)) // 16) for index in next(loader)]
        expected = [order.at(at) for at in range(used + rank, used + 1002, 3)]
        assert found[: len(expected)] == expected


def test_batch_samplers_are_looked_into() -> None:
    data = Numbers("a", 12)
    sampler = DistributedProxySampler(SequentialSampler(data), 1, 0)
    loader = InfiniteDataLoader(DataLoader(data, batch_sampler=BatchSampler(sampler, 3, False), collate_fn=indices_of))
    next(loader)
    assert loader.state_dict()["position"] == 3
