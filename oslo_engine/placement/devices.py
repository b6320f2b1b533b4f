"""What a device map may name: devices on which torch computes here."""

from __future__ import annotations

from typing import Any

import torch

from oslo_engine.errors import PlanError

CPU = torch.device("cpu")


def find_device(named: Any) -> torch.device:
    """The device behind an entry of a map: a number (of an accelerator), "cpu", "cuda:1", a ``torch.device``.

    Raises:
        PlanError: there is no such device here, or nothing can be computed on it.
    """
    if isinstance(named, bool) or not isinstance(named, (int, str, torch.device)):
        raise _no_device(named, "a number, a name such as 'cuda:0' or 'cpu', or a torch.device")
    if isinstance(named, int):
        return _accelerator(named)
    try:
        device = torch.device(named)
    except RuntimeError:
        raise _no_device(named, "a number, 'cpu', or a device of torch such as 'cuda:0'") from None
    if device.type == "cpu":
        return CPU
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        raise _no_device(named, f"'cpu'{f', or {accelerator.type}' if accelerator is not None else ''}")
    return _accelerator(torch.accelerator.current_device_index() if device.index is None else device.index)


def accelerators() -> list[torch.device]:
    """All of this machine, in order."""
    accelerator = torch.accelerator.current_accelerator()
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())] if accelerator else []


def _accelerator(index: int) -> torch.device:
    there = accelerators()
    if not 0 <= index < len(there):
        raise _no_device(index, f"0 to {len(there) - 1}, or 'cpu'" if there else "'cpu': this machine has no accelerator")
    return there[index]


def _no_device(named: Any, expected: str) -> PlanError:
    return PlanError("there is no such device", expected=expected, got=repr(named))
