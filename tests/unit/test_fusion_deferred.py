"""Values that wait: any operation sees what the original would have computed, and no gradient is lost in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_engine.errors import UnsupportedError
from oslo_engine.fusion.deferred import Biased, Deferred, value_of
from oslo_engine.fusion.scope import BiasApart, Fusing, Scope, current
from oslo_engine.layers.specialize import specialize


def waiting(*, grad: bool = True) -> tuple[Deferred, Tensor]:
    """One that waits, and what it stands for."""
    x, bias = torch.randn(2, 3, 4, requires_grad=grad), torch.randn(4, requires_grad=grad)
    return Deferred(Biased(x, bias, "")), x + bias


@pytest.mark.parametrize(
    "operation",
    [
        lambda y: y * 2,
        lambda y: 2 - y,
        lambda y: y @ torch.ones(4, 4),
        lambda y: y.view(6, 4),
        lambda y: y[0, 1:],
        lambda y: torch.cat([y, y], 1),
        lambda y: torch.stack((y, y)),
        lambda y: F.linear(y, torch.ones(5, 4)),
        lambda y: F.gelu(y, approximate="tanh"),
        lambda y: F.dropout(y, 0.0),
        lambda y: y.clone().add_(1),
        lambda y: torch.where(y > 0, y, 0.0),
        lambda y: y + torch.ones(4),
        lambda y: torch.ones(2, 3, 4) + y,
        lambda y: y.to(torch.float64),
        lambda y: y.transpose(0, 1).contiguous(),
        lambda y: y.softmax(-1),
        lambda y: nn.LayerNorm(4)(y),
        lambda y: y.detach(),
    ],
)
@pytest.mark.parametrize("in_scope", [False, True], ids=["outside", "in a scope"])
def test_every_operation_gets_the_value(operation: Callable[[Tensor], Tensor], in_scope: bool) -> None:
    y, wanted = waiting()
    if in_scope:
        with Fusing(attends=True, gates=True):
            got = value_of(operation(y))
    else:
        got = operation(y)
    assert type(got) is Tensor
    assert torch.allclose(got, operation(wanted), atol=1e-6)
    assert got.requires_grad == operation(wanted).requires_grad


def test_what_is_known_of_it_does_not_compute_it() -> None:
    y, wanted = waiting()
    assert isinstance(y, Tensor)
    assert (y.shape, y.dtype, y.device, y.ndim) == (wanted.shape, wanted.dtype, wanted.device, 3)
    assert (y.dim(), y.size(-1), y.numel(), len(y)) == (3, 4, 24, 2)
    assert y.value is None
    assert y.requires_grad
    assert y.value is not None


def test_it_is_computed_once() -> None:
    y, _ = waiting()
    assert value_of(y) is value_of(y)
    assert (y + 0).data_ptr() != value_of(y).data_ptr()


def test_a_write_in_place_is_seen_by_all_who_have_it() -> None:
    y, wanted = waiting(grad=False)
    other = y
    y += 1
    assert torch.allclose(value_of(other), wanted + 1)
    with Fusing():
        z, wanted = waiting(grad=False)
        other = z
        z += torch.ones(2, 3, 4)
    assert torch.allclose(value_of(other), wanted + 1)


def test_gradients_reach_what_it_is_made_of() -> None:
    y, _ = waiting()
    residual = torch.randn(2, 3, 4, requires_grad=True)
    with Fusing():
        total = residual + y
    total.backward(torch.ones(2, 3, 4))
    assert torch.equal(y.recipe.bias.grad, torch.full((4,), 6.0))
    assert torch.equal(y.recipe.x.grad, residual.grad)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_where_its_gradient_would_be_lost_it_raises() -> None:
    with pytest.raises(UnsupportedError, match="gradients are off"):
        _Twice.apply(waiting()[0])
    y, _ = waiting()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="gradients are off"):
        y.mul(2)


def test_an_operation_without_a_torch_function_raises() -> None:
    y, _ = waiting(grad=False)
    with torch._C.DisableTorchFunction(), pytest.raises(UnsupportedError, match="no data yet"):
        torch.ops.aten.mul(y, 2)


def test_a_scope_hands_out_values() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.first(x)
            seen.append(type(y))
            return {"a": y, "b": (y, [y, None]), "c": "text"}

    seen: list[type] = []
    block, x = Block(), torch.randn(2, 4)
    wanted = block(x)["a"]
    specialize(block.first, BiasApart, _oslo_fused_source="first")
    specialize(block, Scope, _oslo_fused_kinds={})
    got = block(x)
    assert seen == [Tensor, Deferred]
    assert all(type(each) is Tensor for each in (got["a"], got["b"][0], got["b"][1][0]))
    assert torch.allclose(got["a"], wanted, atol=1e-6)
    assert current() is None
    assert type(block.first(x)) is Tensor


def test_an_error_in_a_scope_ends_it() -> None:
    with pytest.raises(ValueError, match="mine"), Fusing():
        raise ValueError("mine")
    assert current() is None
