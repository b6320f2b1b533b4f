"""Which modules are norms and activations that a kernel computes. Found by what they compute, never by a class's name.

Every candidate is run on numbers that tell the formulas apart, together with the kernel: its outputs, and the gradients of its
input and parameters, must agree. What differs is left alone, with the difference as the reason.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oslo_engine.kernels.activation import FORMS
from oslo_engine.layers.specialize import keeps_forward, original_class

_ROWS = 7
_SMALLEST_NORM = 2
# A difference of this many units in the last place of the type: an activation and a norm round a few times.
_ULPS = 24


@dataclass(frozen=True)
class NormKind:
    """kind: layer_norm or rms_norm."""

    kind: str
    eps: float
    shift: float


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether its class's forward has one argument that must be given, and nothing but a class of its own stands before it."""
    own: Any = original_class(module)
    if not keeps_forward(module):
        return False
    try:
        parameters = list(inspect.signature(own.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(needed) == 1 and len(parameters) == 1


def difference(got: list[Tensor | None], wanted: list[Tensor | None]) -> float:
    """The largest error, relative to the largest number of each tensor; infinite where there is no telling."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        size = float(b.detach().double().abs().max()) if b.numel() else 0.0
        error = float((a.detach().double() - b.detach().double()).abs().max()) if b.numel() else 0.0
        if not error < float("inf"):
            return float("inf")
        worst = max(worst, error / max(size, 1e-30))
    return worst


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype in (torch.float32, torch.float64) else _ULPS * torch.finfo(dtype).eps


def run(forward: Callable[[Tensor], Any], x: Tensor, parameters: list[Tensor]) -> list[Tensor | None]:
    """Output and gradients, for a gradient in which no two entries are alike."""
    x = x.detach().requires_grad_()
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        y = forward(x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise TypeError("no tensor of the input's shape")
        grad = torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape).to(y.dtype)
        return [y, *torch.autograd.grad(y, [x, *parameters], grad, allow_unused=True)]


# ------------------------------------------------------------------ norms


def is_norm_like(module: nn.Module) -> bool:
    """No children, and one weight, with or without a bias, of one dimension."""
    if next(module.children(), None) is not None or any(True for _ in module.buffers(recurse=False)):
        return False
    parameters = dict(module.named_parameters(recurse=False))
    shapes = {tuple(parameter.shape) for parameter in parameters.values()}
    named = "weight" in parameters and set(parameters) <= {"weight", "bias"}
    return named and len(shapes) == 1 and len(next(iter(shapes))) == 1 and takes_one_tensor(module)


def norm_kind(module: nn.Module) -> tuple[NormKind | None, str]:
    """What kind of norm it is, or None and the reason why it is none that a kernel computes."""
    weight: Any = module.weight
    if weight.is_meta:
        return None, "its weight lives elsewhere"
    if weight.numel() < _SMALLEST_NORM:
        return None, "one number only"
    generator = torch.Generator().manual_seed(weight.numel())
    rows = torch.randn(_ROWS, weight.numel(), generator=generator) + 0.4
    # From rows in which eps is all to rows in which it is nothing.
    rows = (rows * torch.logspace(-4, 1, _ROWS)[:, None]).to(weight.dtype).to(weight.device)
    twin = _spread(module, generator)
    parameters: list[Tensor] = list(twin.parameters())
    try:
        wanted = run(twin, rows, parameters)
    except Exception as error:  # whatever a class raises that is no norm
        told = str(error).partition("\n")[0] or type(error).__name__
        return None, f"it does not run on rows of {weight.numel()}: {told}"
    best = float("inf")
    for kind in _kinds(twin):
        off = difference(run(_kernel_of(twin, kind), rows, parameters), wanted)
        if off <= tolerance(weight.dtype):
            return kind, ""
        best = min(best, off)
    return None, f"no norm that there is a kernel for (the nearest differs by {best:.1e})"


def _spread(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy whose weights differ from one another and from 1."""
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            parameter.requires_grad_()
    return twin


def _kinds(module: nn.Module) -> Iterator[NormKind]:
    small = {float(value) for value in vars(module).values() if isinstance(value, float) and 0 <= value < 0.1} or {1e-6, 1e-5}
    bias = getattr(module, "bias", None)
    for eps in sorted(small):
        yield NormKind("layer_norm", eps, 0.0)
        if bias is None:
            yield NormKind("rms_norm", eps, 0.0)
            yield NormKind("rms_norm", eps, 1.0)


def _kernel_of(module: nn.Module, kind: NormKind) -> Callable[[Tensor], Tensor]:
    weight: Any = module.weight
    bias: Any = getattr(module, "bias", None)
    if kind.kind == "layer_norm":
        from oslo_engine.kernels.layer_norm import layer_norm

        return lambda x: layer_norm(x, weight, bias, kind.eps)
    from oslo_engine.kernels.rms_norm import rms_norm

    return lambda x: rms_norm(x, weight, kind.eps, kind.shift)


# ------------------------------------------------------------------ activations


def is_activation_like(module: nn.Module) -> bool:
    """Nothing inside, one tensor in; not what changes with the mode of training."""
    owns = any(True for _ in (*module.parameters(), *module.buffers(), *module.children()))
    return not owns and takes_one_tensor(module) and not isinstance(module, (nn.Identity, nn.modules.dropout._DropoutNd))


def activation_form(module: nn.Module) -> tuple[str | None, bool]:
    """Which of the kernels' activations it is, or None; and whether it takes several operations."""
    x = torch.linspace(-9, 9, 61, dtype=torch.float32)
    try:
        with _Count() as count:
            wanted = run(module, x, [])
    except Exception:  # whatever a class raises that is no activation
        return None, False
    from oslo_engine.kernels.activation import activation

    for form in FORMS:
        if difference(run(lambda y, form=form: activation(y, form), x, []), wanted) <= tolerance(torch.float32):  # type: ignore[misc]
            return form, count.calls > 1
    return None, False


class _Count(TorchFunctionMode):
    """How many torch functions the module itself calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(out := func(*args, **(kwargs or {})), Tensor):
            self.calls += 1
        return out
