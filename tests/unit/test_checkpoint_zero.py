"""What a ZeRO optimizer takes over, without DeepSpeed: partitions that end inside of parameters, and states that do not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oslo_engine.checkpoint.zero import ZeroState
from oslo_engine.errors import CheckpointError, UnsupportedError

SHAPES = {"a": (2, 3), "b": (5,), "c": (4,)}
PARTITION = 8  # of 15 entries and one of padding


def on_rank(rank: int) -> tuple[ZeroState, SimpleNamespace, dict[str, nn.Parameter]]:
    """An optimizer with one group, as the rank of two has it, and its parameters."""
    parameters = {name: nn.Parameter(torch.full(shape, 9.0)) for name, shape in SHAPES.items()}
    partition, at = torch.zeros(PARTITION), 0
    for parameter in parameters.values():
        low, high = max(at, rank * PARTITION), min(at + parameter.numel(), (rank + 1) * PARTITION)
        place = None if low >= high else mapping(low - at, low - rank * PARTITION, high - low)
        vars(parameter).update(_hp_mapping=place, _dp_group=None)
        at += parameter.numel()
    base = torch.optim.AdamW([partition])
    optimizer = SimpleNamespace(
        single_partition_of_fp32_groups=[partition],
        bit16_groups=[list(parameters.values())],
        optimizer=base,
        loss_scaler=SimpleNamespace(cur_scale=8.0, cur_iter=3),
        dynamic_loss_scale=True,
    )
    return ZeroState(optimizer, {parameter: name for name, parameter in parameters.items()}), optimizer, parameters


def mapping(of: int, to: int, numel: int) -> SimpleNamespace:
    def address(start: int) -> SimpleNamespace:
        return SimpleNamespace(start=start, numel=numel)

    return SimpleNamespace(lp_fragment_address=address(of), hp_fragment_address=address(to))


def saved(key: str, name: str) -> Tensor:
    """Entries that are all different."""
    if key == "step":
        return torch.tensor(7.0)
    first = 100.0 * ("fp32", "exp_avg").index(key) + sum(torch.Size(SHAPES[n]).numel() for n in SHAPES if n < name)
    return torch.arange(first, first + torch.Size(SHAPES[name]).numel()).view(SHAPES[name])


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_takes_its_partition(rank: int) -> None:
    zero, optimizer, _ = on_rank(rank)
    (partition,) = optimizer.single_partition_of_fp32_groups
    optimizer.optimizer.state[partition]["was there"] = 1
    zero.fill({name: ["fp32", "exp_avg", "step"] for name in SHAPES}, saved)
    line = torch.cat([torch.arange(15.0), torch.zeros(1)])[rank * PARTITION : (rank + 1) * PARTITION]
    assert torch.equal(partition, line)
    state = optimizer.optimizer.state[partition]
    assert set(state) == {"exp_avg", "step"}
    assert torch.equal(state["exp_avg"][:7], line[:7] + 100)
    assert state["exp_avg"][7] == (107.0 if rank == 0 else 0.0)
    assert state["step"] == 7


def test_what_is_there_is_written_into() -> None:
    zero, optimizer, _ = on_rank(0)
    state = optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[0]]
    state["exp_avg"] = there = torch.ones(PARTITION)  # DeepSpeed has views of it
    zero.fill({name: ["exp_avg"] for name in SHAPES}, saved)
    assert state["exp_avg"] is there
    assert torch.equal(there, torch.arange(100.0, 108.0))


def test_without_master_weights_the_parameters_are_taken() -> None:
    zero, optimizer, _ = on_rank(1)
    zero.fill({}, saved)
    assert optimizer.single_partition_of_fp32_groups[0].tolist() == [9.0] * 7 + [0.0]


def test_parameters_of_a_group_that_are_not_alike_are_refused() -> None:
    zero, _, _ = on_rank(0)
    with pytest.raises(CheckpointError, match="one state for a whole parameter group"):
        zero.fill({"a": ["exp_avg"], "b": ["exp_avg"]}, saved)

    def counted(key: str, name: str) -> Tensor:
        return torch.tensor(6.0 if name == "c" else 7.0)

    with pytest.raises(CheckpointError, match="step 7 and 6"):
        zero.fill({name: ["step"] for name in SHAPES}, counted)


def test_the_loss_scale_goes_over() -> None:
    zero, optimizer, _ = on_rank(0)
    assert zero.loss_scale() == {"cur_scale": 8.0, "cur_iter": 3}
    zero.set_loss_scale({"cur_scale": 2.0, "last_overflow_iter": 1})
    assert vars(optimizer.loss_scaler) == {"cur_scale": 2.0, "cur_iter": 3}


def test_what_is_neither_a_number_nor_like_the_partition_is_refused() -> None:
    zero, optimizer, _ = on_rank(0)
    optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[0]]["rows"] = torch.zeros(2)
    plan: Any = SimpleNamespace(tensor=lambda name: SimpleNamespace(shape=SHAPES[name]))
    with pytest.raises(UnsupportedError, match="rows of a"):
        zero.entries(plan)


def test_another_deepspeed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="this version of DeepSpeed"):
        ZeroState(SimpleNamespace(), {})
