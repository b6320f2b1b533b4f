"""Remembered operations give what ``FakeTensorMode`` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from oslo_engine.footprint.live_bytes import LiveBytes
from oslo_engine.footprint.outcomes import Outcomes

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "new": lambda x: x + x,
    "view": lambda x: x.view(2, -1),
    "view with an offset": lambda x: x[1:, 2],
    "transposed": lambda x: x.transpose(0, 1),
    "whole number": lambda x: x * 2,
    "true number": lambda x: x * 2.0,
    "in place": lambda x: x.add_(1),
    "several": lambda x: x.split(2, dim=1),
    "sum": lambda x: x.sum(0, keepdim=True),
    "other type": lambda x: x.to(torch.bfloat16),
    "slices": lambda x: (x[1:3], x[:, 1:4:2], x[-3:-1], x[2:100], x[3:1], x[9:], x[:-9], x[:, -4::3]),
    "place in the storage": lambda x: x.as_strided((2, 2), (2, 1), 3),
    "place in the storage, its own": lambda x: x.as_strided((2, 2), (2, 1)),
    "bytes": lambda x: x.view(torch.uint8),
    "product": lambda x: torch.nn.functional.linear(x.float(), x.float()),
}


def described(x: Tensor, out: Any) -> list[Any]:
    return [
        (
            each is x,
            each.shape,
            each.stride(),
            each.dtype,
            each.device,
            each.storage_offset(),
            each.untyped_storage().nbytes(),
            each.untyped_storage()._cdata == x.untyped_storage()._cdata,
        )
        for each in (out if isinstance(out, tuple) else (out,))
    ]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_remembered_operation_gives_what_it_gave_wherever_its_argument_begins(name: str, dtype: torch.dtype) -> None:
    outcomes = Outcomes()
    for begin in (0, 0, 8, 4):
        with FakeTensorMode():
            x = torch.empty(12, 6, dtype=dtype)[begin : begin + 4]
            expected = described(x, OPERATIONS[name](x))
            with LiveBytes(outcomes.run) as live:
                live.begin(("", ""))
                found = described(x, OPERATIONS[name](x))
        assert found == expected


def test_same_call_is_worked_out_once_and_others_anew() -> None:
    outcomes = Outcomes()
    with FakeTensorMode(), LiveBytes(outcomes.run) as live:
        live.begin(("", ""))
        x = torch.empty(4, 6)
        for _ in range(3):
            assert (x * 2).shape == (4, 6)
        assert len(outcomes._known) == 1
        assert (torch.empty(5, 6) * 2).shape == (5, 6)
        assert (torch.empty(4, 6, dtype=torch.int64) * 2).dtype == torch.int64
        assert (torch.empty(4, 6, dtype=torch.int64) * 2.0).dtype == torch.float32
        assert len(outcomes._known) == 4


def test_real_tensors_are_never_remembered() -> None:
    outcomes = Outcomes()
    with LiveBytes(outcomes.run) as live:
        live.begin(("", ""))
        assert torch.equal(torch.ones(2) + torch.ones(2), torch.full((2,), 2.0))
        assert torch.equal(torch.ones(2) + torch.full((2,), 2.0), torch.full((2,), 3.0))
    assert outcomes._known == {}
