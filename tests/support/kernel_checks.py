"""Kernels against fp64: the reference in this process, the Triton programs in another one, under Triton's interpreter.

Whether triton interprets is decided when it is imported, so the interpreter has a process of its own. It stays for the session
and takes calls by name: ``evaluate`` runs in it, or here, with the same arguments.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

# The two implementations that a machine without a GPU can run.
WAYS = ["reference", "interpreter"]
LOW_PRECISION = [torch.bfloat16, torch.float16]
# Relative to the largest value. Inputs are rounded before both sides see them, so what remains is the rounding of the output.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}

_interpreter: ProcessPoolExecutor | None = None


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = True) -> Tensor:
    """A leaf with normal values."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_(grad)


def as_leaf(view: Tensor) -> Tensor:
    """A leaf with the strides of ``view``."""
    return view.detach().requires_grad_()


def check(
    way: str,
    name: str,
    formula: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    layout: str = "plain",
    used: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    saved: torch.dtype | None = None,
) -> list[Tensor]:
    """Compare outputs and every gradient of a kernel with a formula in fp64; return the kernel's outputs.

    Args:
        way: one of WAYS.
        name: "module.function" of oslo_engine.kernels.
        formula: called with the same arguments in fp64.
        layout: of the outputs' gradients: "plain", "transposed" (strided) or "expanded" (stride 0).
        used: which outputs the loss depends on; all by default.
        dtypes: expected of the outputs; by default the first argument's.
        saved: what the kernel rounds to before it computes gradients, if anything; they can be no better than that.
    """
    outputs, grads = run(way, evaluate, name, arguments, layout, used)
    wide = [_widened(argument) for argument in arguments]
    expected = formula(*wide)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    dtypes = dtypes or [arguments[0].dtype] * len(outputs)
    assert [output.dtype for output in outputs] == list(dtypes)
    for position, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        assert_close(output, right, f"output {position}")
    positions = [position for position, argument in enumerate(arguments) if _is_leaf(argument)]
    if positions:
        right_grads = _gradients(expected, [wide[position] for position in positions], dtypes, layout, used)
        for position, right in zip(positions, right_grads, strict=True):
            assert grads[position].dtype == arguments[position].dtype
            assert_close(grads[position], right, f"gradient of argument {position}", saved)
    return outputs


def run(way: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this module here, or where Triton's programs are interpreted."""
    if way == "reference":
        return function(*arguments)
    if find_spec("triton") is None:
        pytest.skip("needs triton, for its interpreter")
    return pickle.loads(_start_interpreter().submit(_answer, pickle.dumps((function.__name__, arguments))).result(timeout=100))


def evaluate(
    name: str, arguments: Sequence[Any], layout: str = "plain", used: Sequence[int] | None = None
) -> tuple[list[Any], list[Any]]:
    """Call ``module.function`` of oslo_engine.kernels; return its outputs, and the gradients of its arguments (or None)."""
    module, function = name.rsplit(".", 1)
    outputs = getattr(import_module(f"oslo_engine.kernels.{module}"), function)(*arguments)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    leaves = [argument for argument in arguments if _is_leaf(argument)]
    found = iter(_gradients(outputs, leaves, [output.dtype for output in outputs], layout, used) if leaves else [])
    grads = [next(found) if _is_leaf(argument) else None for argument in arguments]
    return [output.detach() for output in outputs], grads


def evaluate_far(name: str, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``evaluate`` with the rows of the first argument so far apart that 32 bits cannot count to the last."""
    x, distance = arguments[0], 2**30
    rows = x.shape[:-1].numel()
    with tempfile.TemporaryFile() as file:  # sparse: what is not touched takes no space
        file.truncate(((rows - 1) * distance + x.shape[-1]) * x.element_size())
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=x.dtype)
    view = memory.as_strided((rows, x.shape[-1]), (distance, 1))
    view.copy_(x.detach().view(view.shape))
    return evaluate(name, [as_leaf(view.view(x.shape)), *arguments[1:]])


def assert_close(found: Tensor, right: Tensor, what: str = "values", saved: torch.dtype | None = None) -> None:
    """Equal up to the rounding of ``found``'s dtype, or of ``saved`` if that is coarser; infinities and all."""
    assert found.shape == right.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(right.shape)}"
    found, tolerance = found.double(), max(TOLERANCE[found.dtype], TOLERANCE[saved or found.dtype])
    assert not found.isnan().any(), f"{what}: nan"
    finite = right[right.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    atol = tolerance * max(largest, 0.1)
    torch.testing.assert_close(found, right.detach().double(), rtol=tolerance, atol=atol, msg=lambda text: f"{what}: {text}")


def gradient_of(shape: torch.Size, dtype: torch.dtype, position: int, layout: str) -> Tensor:
    """What flows back into output ``position``: always the same values."""
    if layout == "expanded":
        return random(1, dtype=dtype, seed=50 + position, grad=False).expand(shape)
    if layout == "transposed":
        return random(*reversed(shape), dtype=dtype, seed=50 + position, grad=False).permute(*range(len(shape) - 1, -1, -1))
    return random(*shape, dtype=dtype, seed=50 + position, grad=False)


def _gradients(
    outputs: list[Tensor], leaves: list[Tensor], dtypes: Sequence[torch.dtype], layout: str, used: Sequence[int] | None
) -> tuple[Tensor, ...]:
    chosen = [position for position in range(len(outputs)) if used is None or position in used]
    grads = [gradient_of(outputs[at].shape, dtypes[at], at, layout).to(outputs[at].dtype) for at in chosen]
    return torch.autograd.grad([outputs[at] for at in chosen], leaves, grads)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _start_interpreter() -> ProcessPoolExecutor:
    global _interpreter
    if _interpreter is None:
        _interpreter = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_switch_on)
    return _interpreter


def _switch_on() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _answer(request: bytes) -> bytes:
    function, arguments = pickle.loads(request)
    return pickle.dumps(globals()[function](*arguments))
