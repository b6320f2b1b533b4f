"""``parallelize(model, auto=True)``: all ranks choose one layout, which fits and computes what one device does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import small_models
from oslo_engine import OsloError, parallelize
from oslo_engine.footprint.workload import Workload
from rank_pool import RankPool

ROWS, LENGTH = 4, 16
WORK = Workload(length=LENGTH)


def small() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    cls, config, _ = small_models.SMALL["gpt2"]()
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    ids = torch.randint(3, small_models.VOCAB, (ROWS, LENGTH))
    return cls(config).train(), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def state_bytes(model: Any) -> int:
    """Weights, gradients and Adam's two numbers."""
    return 4 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def chosen(memory: int) -> tuple[tuple[int, ...], float, int, list[str]]:
    """(sizes and settings, loss of a batch, bytes of states, what was logged) of this rank."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oslo_engine.api").addHandler(handler)
    model, batch = small()
    split: Any = parallelize(model, auto=True, batch=ROWS, max_memory=memory, workload=WORK)
    logging.getLogger("oslo_engine.api").removeHandler(handler)
    mpu = split.mpu
    sizes = (
        mpu.get_tensor_parallel_world_size(),
        mpu.get_pipeline_parallel_world_size(),
        mpu.get_data_parallel_world_size(),
    )
    rows = ROWS // sizes[2]
    start = rows * mpu.get_data_parallel_rank()
    own = {name: value[start : start + rows] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    return sizes, float(split.train_step(own)), state_bytes(split), told


def refused() -> str:
    try:
        parallelize(small()[0], auto=True, batch=ROWS, max_memory="8KiB", workload=WORK)
    except OsloError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("share", [4.0, 0.8])
def test_every_rank_chooses_one_layout_that_fits_and_trains_as_one_device(
    rank_pool: Callable[[int], RankPool], share: float
) -> None:
    model, batch = small()
    whole = state_bytes(model)
    expected = float(model(**batch).loss.detach())
    found = rank_pool(2).run(chosen, int(share * whole))
    sizes, losses = [each[0] for each in found], [each[1] for each in found]
    assert sizes[0] == sizes[1]
    assert sizes[0][0] * sizes[0][1] * sizes[0][2] == 2
    assert sizes[0][2] == 1 or share > 1
    assert all(each[2] <= share * whole for each in found)
    assert sum(losses) / 2 == pytest.approx(expected, rel=1e-5)
    told = [each[3] for each in found]
    assert len(told[0]) == 1, told
    assert f"tp={sizes[0][0]} pp={sizes[0][1]} dp={sizes[0][2]}" in told[0][0]
    assert told[1] == [], "one rank speaks for all"


def test_model_that_fits_nowhere_is_refused_on_every_rank(rank_pool: Callable[[int], RankPool]) -> None:
    for message in rank_pool(2).run(refused):
        assert "no layout of this model fits on these ranks" in message
        assert "at most 8 KiB on each of 2 ranks" in message


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"auto": True, "tp": 2}, "goes with none of your own"),
        ({"auto": True, "device_map": {"": "cpu"}}, "no splitting over ranks"),
        ({"auto": True, "max_memory": {"cpu": 1}}, "one size for every rank"),
        ({"auto": True, "max_memory": "-1GiB"}, "no size of memory"),
        ({"auto": True, "batch": 0}, "batch must be a positive whole number"),
        ({"batch": 4}, "batch belongs to auto=True"),
        ({"max_memory": "4GiB"}, "belong to a device map or to auto=True"),
    ],
)
def test_setting_that_contradicts_auto_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OsloError, match=complaint):
        parallelize(small()[0], **options)
