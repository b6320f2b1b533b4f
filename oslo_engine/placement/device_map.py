"""Reading a device map: from any of its forms to a device for every path that it names, all faults told at once.

{0: [0, 1, 2], 1: [3, 4, 5]}                       block numbers by device, of every main stack
{"encoder": {0: [0, 1]}, "decoder": {1: [0, 1]}}   the same for each list of blocks, called by a part of its path
{"h": {"cpu": [0, 1], 0: [2, 3]}, "lm_head": 0}    and modules by path
{"": 0, "transformer.h.3": 1}                      paths only; the most specific holds
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from oslo_engine.errors import OsloError, PlanError
from oslo_engine.placement.devices import find_device
from oslo_engine.placement.stacks import Stack

DeviceMap = Mapping[Any, Any]
_HINT = 'device_map="balanced" makes a map; docs/device_map.md shows the forms'


class Faults:
    """What is wrong with a map, told at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, what: str) -> None:
        if what not in self.found:
            self.found.append(what)

    def raise_any(self, model: PreTrainedModel) -> None:
        """
        Raises:
            PlanError: there is a fault.
        """
        if self.found:
            told = self.found[0] if len(self.found) == 1 else "".join(f"\n  - {fault}" for fault in self.found)
            what = "the device map does not fit the model" + (
                ": " + told if len(self.found) == 1 else f"; {len(self.found)} faults:{told}"
            )
            raise PlanError(what, where=type(model).__name__, hint=_HINT)


def read_device_map(
    model: PreTrainedModel, device_map: DeviceMap, stacks: Sequence[Stack], faults: Faults
) -> dict[str, torch.device]:
    """The device of every path that a map names; what is wrong with it goes to ``faults``.

    Args:
        stacks: of the model.
    """
    if not isinstance(device_map, Mapping) or not device_map:
        faults.add(f"it must be a dict that names at least one device, and is {device_map!r}")
        return {}
    return _Reader(model, stacks, faults).read(device_map)


class _Reader:
    def __init__(self, model: PreTrainedModel, stacks: Sequence[Stack], faults: Faults) -> None:
        self.model, self.stacks, self.faults = model, stacks, faults
        self.paths = dict(model.named_modules(remove_duplicate=False))
        self.found: dict[str, torch.device] = {}
        self.unclear: set[str] = set()  # named with a device that is a fault already

    def read(self, device_map: DeviceMap) -> dict[str, torch.device]:
        numbers: dict[Any, Any] = {}
        for key, value in device_map.items():
            if isinstance(value, Mapping):
                self._read_stack(key, value)
            elif isinstance(value, Iterable) and not isinstance(value, str):
                numbers[key] = value
            else:
                self._place(key, self._device(value))
        if numbers:
            for stack in self._main_stacks():
                self._read_numbers(stack, numbers)
        self._check_blocks()
        return self.found

    def _main_stacks(self) -> list[Stack]:
        main = [stack for stack in self.stacks if stack.main]
        lengths = {len(stack.blocks) for stack in main}
        if len(lengths) == 1:
            return main
        lists = ", ".join(f"{stack.name} ({len(stack.blocks)})" for stack in main)
        self.faults.add(
            f"block numbers must say of which list they are: {lists}"
            if main
            else "the model has no list of blocks; name modules"
        )
        return []

    def _read_stack(self, name: Any, by_device: Mapping[Any, Any]) -> None:
        called = [stack for stack in self.stacks if isinstance(name, str) and stack.is_called(name)]
        if len(called) == 1:
            self._read_numbers(called[0], by_device)
        elif called:
            self.faults.add(f"{name!r} names several lists of blocks: {', '.join(stack.name for stack in called)}")
        else:
            there = ", ".join(stack.name for stack in self.stacks) or "none"
            self.faults.add(f"there is no list of blocks called {name!r}; the model has: {there}")

    def _read_numbers(self, stack: Stack, by_device: Mapping[Any, Any]) -> None:
        if not by_device:
            self.faults.add(f"{stack.name} is given no device")
        count = len(stack.blocks)
        seen: set[int] = set()
        for named, numbers in by_device.items():
            device = self._device(named)
            listed = list(numbers) if isinstance(numbers, Iterable) and not isinstance(numbers, str) else None
            if not listed:
                self.faults.add(
                    f"device {named!r} has no block"
                    if listed == []
                    else f"device {named!r} needs a list of numbers, not {numbers!r}"
                )
                continue
            for number in listed:
                if isinstance(number, str):
                    self._place(number, device)
                elif isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
                    self.faults.add(f"{stack.name} has blocks 0 to {count - 1}, not {number!r}")
                elif number in seen and self.found.get(stack.blocks[number]) == device:
                    self.faults.add(f"{stack.blocks[number]} is named twice")
                else:
                    seen.add(number)
                    self._place(stack.blocks[number], device)

    def _device(self, named: Any) -> torch.device | None:
        try:
            return find_device(named)
        except OsloError as error:
            self.faults.add(f"{error.what}: {error.got}; expected {error.expected}")
            return None

    def _place(self, path: Any, device: torch.device | None) -> None:
        if path not in self.paths:
            near = difflib.get_close_matches(str(path), self.paths, n=2)
            self.faults.add(f"the model has no module {path!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        elif path in self.found and device is not None and self.found[path] != device:
            self.faults.add(f"{path} is placed twice: on {self.found[path]} and {device}")
        elif path in self.found and not any(stack.main and path in stack.blocks for stack in self.stacks):
            self.faults.add(f"{path} is named twice")
        elif device is not None:
            self.found[path] = device
        else:
            self.unclear.add(path)

    def _check_blocks(self) -> None:
        """Every block has a device, as a whole: what it adds up inside must meet on one."""
        for stack in self.stacks:
            missing = [
                number
                for number, block in enumerate(stack.blocks)
                if nearest(self.found, block) is None and not any(f"{block}.".startswith(f"{path}.") for path in self.unclear)
            ]
            if missing:
                self.faults.add(f"blocks of {stack.name} without a device: {', '.join(map(str, missing))}")
            for block in stack.blocks:
                own = nearest(self.found, block)
                for path, device in self.found.items():
                    if path.startswith(f"{block}.") and device != own:
                        self.faults.add(f"{path} is to lie on {device}, but its block {block} on {own}: a block is not divided")


def nearest(placed: Mapping[str, torch.device], path: str) -> torch.device | None:
    """The device of a path: of the longest placed path that it lies in."""
    while True:
        if path in placed:
            return placed[path]
        if not path:
            return None
        path = path.rpartition(".")[0]
