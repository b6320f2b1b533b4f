"""Linear layers whose weight gradient can be put off: always the ordinary numbers, at another time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from oslo_engine.layers import deferred
from oslo_engine.layers.deferred import DeferredConv1D, DeferredLinear, collect_weight_gradients, conv1d, deferrable, linear


def make(kind: str, **kwargs: Any) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(5, 7, **kwargs) if kind == "linear" else Conv1D(7, 5)


def named(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def swapped(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    twin.__class__ = DeferredLinear if isinstance(module, nn.Linear) else DeferredConv1D
    return twin


def gradients(module: nn.Module, x: Tensor, *, put_off: bool, autocast: bool = False) -> dict[str, Tensor | None]:
    """Gradients of x and of the parameters, those of queued weights computed at the end."""
    x = x.clone().requires_grad_()
    with deferrable() if put_off else nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = module(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    names = ["x", *(name for name, p in module.named_parameters() if p.requires_grad)]
    inputs = [x, *(p for p in module.parameters() if p.requires_grad)]
    with collect_weight_gradients() if put_off else nullcontext([]) as queue:
        found = dict(zip(names, torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True), strict=True))
    if put_off and "weight" in found:
        assert found["weight"] is None
        (entry,) = queue
        assert entry.weight is module.weight
        found["weight"] = entry.compute()
    return {"y": y.detach(), **found}


@pytest.fixture(params=["linear", "conv1d"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 1, 3, 5)])
@pytest.mark.parametrize("put_off", [False, True])
def test_outputs_and_gradients_are_those_of_the_ordinary_layer(kind: str, shape: tuple[int, ...], put_off: bool) -> None:
    module = make(kind).double()
    x = torch.randn(shape, dtype=torch.float64)
    expected, found = gradients(module, x, put_off=False), gradients(swapped(module), x, put_off=put_off)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14, msg=named(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_rounding_are_those_of_the_ordinary_layer(kind: str, dtype: torch.dtype) -> None:
    module, x = make(kind).to(dtype), torch.randn(4, 5, dtype=dtype)
    expected, found = gradients(module, x, put_off=False), gradients(swapped(module), x, put_off=True)
    for name, gradient in found.items():
        assert gradient.dtype == expected[name].dtype
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_parameters(kind: str) -> None:
    module, x = make(kind), torch.randn(2, 3, 5)
    expected = gradients(module, x, put_off=False, autocast=True)
    for put_off in (False, True):
        found = gradients(swapped(module), x, put_off=put_off, autocast=True)
        assert found["y"].dtype == torch.bfloat16
        for name, gradient in found.items():
            assert gradient.dtype == expected[name].dtype, name
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0, msg=named(name))


def test_double_precision_stays_out_of_autocast(kind: str) -> None:
    found = gradients(swapped(make(kind).double()), torch.randn(3, 5, dtype=torch.float64), put_off=True, autocast=True)
    assert found["y"].dtype == found["weight"].dtype == torch.float64


def test_queued_gradient_builds_no_graph(kind: str) -> None:
    module = swapped(make(kind))
    with deferrable():
        y = module(torch.randn(3, 5, requires_grad=True) * 2)
    with collect_weight_gradients() as queue:
        torch.autograd.grad(y.sum(), list(module.parameters()), allow_unused=True)
    assert not queue[0].compute().requires_grad


def test_frozen_weight_is_not_queued(kind: str) -> None:
    module = swapped(make(kind))
    module.weight.requires_grad_(False)
    found = gradients(module, torch.randn(3, 5), put_off=True)
    assert "weight" not in found
    assert found["bias"] is not None


def test_frozen_bias_and_no_bias_work() -> None:
    for module in (make("linear"), make("linear", bias=False)):
        if module.bias is not None:
            module.bias.requires_grad_(False)
        x = torch.randn(3, 5)
        expected, found = gradients(module, x, put_off=False), gradients(swapped(module), x, put_off=True)
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found["weight"], expected["weight"])


@pytest.mark.parametrize("function", [linear, conv1d])
def test_computed_and_hooked_weights_stay_with_autograd(function: Any) -> None:
    """A queue could not give them what their graph or their hook adds."""
    base = torch.randn(5, 5, requires_grad=True)
    hooked = torch.randn(5, 5, requires_grad=True)
    hooked.register_hook(lambda gradient: gradient * 10)
    for weight, leaf in ((base * 2, base), (hooked, hooked)):
        with deferrable():
            y = function(torch.ones(1, 5), weight)
        with collect_weight_gradients() as queue:
            (gradient,) = torch.autograd.grad(y.sum(), leaf)
        assert not queue
        torch.testing.assert_close(gradient, torch.full((5, 5), 2.0 if leaf is base else 10.0))


@pytest.mark.parametrize("function", [linear, conv1d])
def test_outside_a_zero_bubble_batch_the_layers_are_the_ordinary_ones(function: Any) -> None:
    """Also twice differentiable, which the queueing form is not."""
    weight = torch.randn(5, 5, requires_grad=True, dtype=torch.float64)
    x = torch.randn(2, 5, requires_grad=True, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x, w: function(x, w).tanh(), (x, weight))
    with deferrable():
        assert "_Linear" in type(linear(x, weight).grad_fn).__name__
        assert "_Conv1D" in type(conv1d(x, weight).grad_fn).__name__
    assert "_Linear" not in type(linear(x, weight).grad_fn).__name__


def test_weight_used_twice_gives_two_entries_that_add_up() -> None:
    weight, x = torch.randn(5, 5, requires_grad=True), torch.randn(3, 5)
    with deferrable():
        y = linear(linear(x, weight), weight)
    with collect_weight_gradients() as queue:
        assert torch.autograd.grad(y.sum(), weight, allow_unused=True) == (None,)
    (expected,) = torch.autograd.grad(((x @ weight.t()) @ weight.t()).sum(), weight)
    torch.testing.assert_close(sum(entry.compute() for entry in queue), expected)


def test_recomputed_layers_are_queued_once() -> None:
    module = swapped(make("linear"))
    x = torch.randn(3, 5)
    with deferrable():
        y = checkpoint(lambda x: module(x).tanh(), x, use_reentrant=False)
    with collect_weight_gradients() as queue:
        torch.autograd.grad(y.sum(), list(module.parameters()), allow_unused=True)
    (expected,) = torch.autograd.grad(module(x).tanh().sum(), module.weight)
    assert [entry.weight is module.weight for entry in queue] == [True]
    torch.testing.assert_close(queue[0].compute(), expected)


def test_queues_and_preparation_end_with_their_block_also_on_errors() -> None:
    for context in (deferrable, collect_weight_gradients):
        with pytest.raises(KeyError), context():
            raise KeyError
    assert deferred._queue is None
    assert deferred._deferrable is False


def test_swapped_modules_keep_their_state_and_kind(kind: str) -> None:
    module = make(kind)
    twin = swapped(module)
    assert isinstance(twin, nn.Linear if kind == "linear" else Conv1D)
    assert twin.state_dict().keys() == module.state_dict().keys()
    twin.load_state_dict(module.state_dict())
    assert isinstance(copy.deepcopy(twin), type(twin))
