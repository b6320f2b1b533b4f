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
from oslo_engine.fusion.scope import BiasApart, Fusing, Norm, Scope, current
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


def test_capped_and_biased_scores_are_one_kernel() -> None:
    x, bias = torch.randn(2, 3, 4, 5, requires_grad=True), torch.randn(2, 1, 4, 5)
    wanted = (torch.tanh(x * 0.5 / 20.0) * 20.0 + bias).softmax(-1)
    with Fusing(attends=True):
        scores = torch.tanh(x * 0.5 / 20.0) * 20.0 + bias
        assert isinstance(scores, Deferred)
        assert (scores.recipe.capped, scores.recipe.softcap, scores.recipe.bias is bias) == (True, 20.0, True)
        got = scores.softmax(-1)
    assert type(got) is Tensor
    assert torch.allclose(got, wanted, atol=1e-6)
    assert torch.allclose(value_of(scores), torch.tanh(x * 0.5 / 20.0) * 20.0 + bias, atol=1e-5)


def rotated(x: Tensor, other: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = other.shape[-1] // 2
    return x * cos + torch.cat((-other[..., half:], other[..., :half]), -1) * sin


def test_only_a_tensor_turned_with_its_own_halves_is_a_rotation() -> None:
    angles = torch.randn(2, 1, 5, 4).repeat(1, 1, 1, 2)
    tables = angles.cos(), angles.sin()
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    kernels: list[str] = []

    class Seen(Fusing):
        def emit(self, kernel: str, *rest: Any) -> Any:
            kernels.append(kernel)
            return super().emit(kernel, *rest)

    with Seen(rotates=True):
        assert torch.allclose(value_of(rotated(q, q, *tables)), rotated(q, q, *tables), atol=1e-6)
        assert kernels == ["rotary"] * 2
        mixed = value_of(rotated(q, k, *tables))
    assert kernels == ["rotary"] * 2
    assert torch.allclose(mixed, rotated(q, k, *tables), atol=1e-6)


def test_the_sum_before_a_norm_is_computed_by_the_norm_and_not_again() -> None:
    norm = nn.LayerNorm(4)
    wanted_norm = nn.LayerNorm(4)
    fields = {"source": "", "kind": "layer_norm", "eps": 1e-5, "shift": 0.0}
    specialize(norm, Norm, **{f"_oslo_fused_{key}": value for key, value in fields.items()})
    x, residual = torch.randn(2, 4), torch.randn(2, 4)
    with Fusing() as scope:
        total = residual + scope.defer(Biased(x, None, ""))
        assert isinstance(total, Deferred)
        y = norm(total)
        assert total.value is not None
    assert torch.allclose(y, wanted_norm(x + residual), atol=1e-6)
    assert torch.allclose(value_of(total), x + residual)


def test_what_is_compiled_inside_a_scope_is_the_original() -> None:
    linear = nn.Linear(4, 4)
    specialize(linear, BiasApart, _oslo_fused_source="")
    compiled = torch.compile(lambda x: F.gelu(linear(x)), backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    with Fusing(attends=True, gates=True):
        got = compiled(x)
    assert type(got) is Tensor
    assert torch.allclose(got, F.gelu(x @ linear.weight.t() + linear.bias), atol=1e-6)
    torch._dynamo.reset()


def test_an_error_in_a_scope_ends_it() -> None:
    with pytest.raises(ValueError, match="mine"), Fusing():
        raise ValueError("mine")
    assert current() is None
