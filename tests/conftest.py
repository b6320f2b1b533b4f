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
    pools: dict[int, RankPool] = {}

    def of_size(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield of_size
    for pool in pools.values():
        pool.kill()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not _has_gpu():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
