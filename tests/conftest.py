"""What every test runs under: one thread, the loopback interface, no hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from rank_pool import RankPool

# Read when torch and transformers are imported, which happens later, here and in the ranks (they inherit it).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """``rank_pool(2).run(job, ...)``: the pools of the session by world size, see tests/support/rank_pool.py."""

    def of_size(world_size: int) -> RankPool:
        return _POOLS.setdefault(world_size, RankPool(world_size))

    yield of_size
    _stop_ranks()


_POOLS: dict[int, RankPool] = {}


def _stop_ranks() -> None:
    for pool in _POOLS.values():
        pool.kill()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Behind the tests that need ranks none stay: even idle, the threads of their process groups take a good part of a core."""
    if "ranks" not in item.path.parts and "rank_pool" not in getattr(item, "fixturenames", ()):
        _stop_ranks()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
