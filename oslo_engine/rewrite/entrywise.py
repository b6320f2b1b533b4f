"""Whether an optimizer works entry by entry, found out by trying.

Adam moves each entry of a weight by what it knows of that entry; then a slice of the weight is moved as the whole would be.
Adafactor, Muon, LAMB or Shampoo look at rows, norms or spectra of a whole matrix, L-BFGS at all parameters together: on slices
they do something else, and nothing would tell. No list of names could be complete, so an optimizer of the same class and with
the same options steps over small matrices, whole and in pieces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_ROWS, _COLUMNS = 96, 64  # many, since some look at a matrix only from a certain size on
_STEPS = 3
_LEARNING_RATE = 0.01  # not the optimizer's own, which may be zero while it warms up
_TOLERANCE = 0.02  # of the norm of all changes: states in 8 bits have other rounding in pieces
_LEFT_OUT = ("params", "foreach", "fused", "capturable", "differentiable")  # say how to compute, not what

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_known: dict[tuple[Any, ...], bool | None] = {}


def works_entrywise(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], device: torch.device, *, tp: bool, pp: bool
) -> bool | None:
    """Whether an optimizer makes the same changes when each rank runs its own over what it holds.

    Args:
        group: the options of one of its groups.
        tp: try with halves of matrices. pp: try with one of two matrices.

    Returns:
        None where it cannot be tried: it could not be made or run like this, or it draws random numbers.
    """
    kind = type(optimizer)
    options = _options(kind, group)
    key = (kind, repr(sorted(options.items())), device, tp, pp)
    if key not in _known:
        try:
            _known[key] = _try(lambda parameters: kind(parameters, **options), device, tp=tp, pp=pp)  # type: ignore[arg-type]
        except Exception:
            _known[key] = None
    return _known[key]


def _options(kind: type, group: Mapping[str, Any]) -> dict[str, Any]:
    accepted = inspect.signature(kind).parameters
    options = {name: value for name, value in group.items() if name in accepted and name not in _LEFT_OUT}
    if options.get("lr") is not None:
        options["lr"] = _LEARNING_RATE
    return options


def _try(make: Make, device: torch.device, *, tp: bool, pp: bool) -> bool | None:
    first, second = _matrix(0, device), _matrix(1, device)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        whole = _changes(make, [first, second])
        if not bool(whole.abs().max() > 0) or _differ(_changes(make, [first, second]), whole):
            return None
        right = whole.chunk(2)
        if pp and any(_differ(_changes(make, [one]), change) for one, change in zip((first, second), right, strict=True)):
            return False
        for dim in (0, 1) if tp else ():
            for part in (0, 1):
                wanted = torch.cat([change.chunk(2, dim)[part] for change in right])
                pieces = [one.chunk(2, dim)[part].contiguous() for one in (first, second)]
                if _differ(_changes(make, pieces), wanted):
                    return False
    return True


def _matrix(number: int, device: torch.device) -> Tensor:
    """Random, one quarter of it much larger: of what is alike everywhere, a part looks like the whole."""
    values = torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(number))
    values[: _ROWS // 2, : _COLUMNS // 2] *= 8.0
    return (values * (number + 1)).to(device)


def _changes(make: Make, values: list[Tensor]) -> Tensor:
    """What some steps towards other values change, one matrix under the other."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = make(parameters)

    def gradients() -> Tensor:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = (parameter.detach() - 0.5 * value) * value.abs()
        return torch.stack([parameter.grad.pow(2).sum() for parameter in parameters if parameter.grad is not None]).sum()

    with torch.enable_grad():
        for _ in range(_STEPS):
            gradients()
            _step(optimizer, gradients)
    return torch.cat([parameter.detach() - value for parameter, value in zip(parameters, values, strict=True)])


def _step(optimizer: torch.optim.Optimizer, gradients: Callable[[], Tensor]) -> None:
    needs_closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if needs_closure is not None and needs_closure.default is inspect.Parameter.empty:
        optimizer.step(lambda: float(gradients()))  # type: ignore[call-overload]
    else:
        optimizer.step()


def _differ(one: Tensor, other: Tensor) -> bool:
    return not bool((one - other).norm() <= _TOLERANCE * other.norm())
