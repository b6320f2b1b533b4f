"""Values move by themselves: hooks where a forward crosses from one device to another, and nowhere else.

Blocks of a stack that lies on several devices, and the modules outside the blocks, bring what they are called with to their
device. Modules on several devices bring their arguments to where their own code begins; what belongs to labels goes to the
head, and what they merely hand on to their blocks stays where it is. A value is copied once to a device in a forward, however
many blocks ask for it. Caches and outputs are no tensors in plain containers, and stay where they are.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import find_labels

# What a decoder's code hands to its blocks, which bring it to their own devices.
HANDED_ON = ("encoder_hidden_states",)


class Copies:
    """Copies made in the forward that runs now: (the value, its version, device, whether gradients flow) -> copy."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device, bool], tuple[Tensor, int, Tensor]] = {}

    def on(self, device: torch.device, value: Any) -> Any:
        """The value with every tensor in it on a device; the same object where nothing had to move."""
        if isinstance(value, Tensor):
            return value if value.device == device else self._copy(value, device)
        kind = type(value)
        if kind is tuple or kind is list:
            moved = [self.on(device, item) for item in value]
            return kind(moved) if any(new is not old for new, old in zip(moved, value, strict=True)) else value
        if kind is dict or kind is WriteThrough:
            changed = {key: self.on(device, item) for key, item in value.items()}
            same = all(changed[key] is item for key, item in value.items())
            return value if same else WriteThrough(changed, value)
        return value

    def clear(self) -> None:
        self._made.clear()

    def _copy(self, value: Tensor, device: torch.device) -> Tensor:
        # A copy made without gradients, as inside a checkpointed block, must not serve one that needs them.
        key = (id(value), device, torch.is_grad_enabled())
        version = 0 if value.is_inference() else value._version
        known = self._made.get(key)
        if known is not None and known[0] is value and known[1] == version:
            return known[2]
        copied = value.to(device, non_blocking=True)
        self._made[key] = (value, version, copied)
        return copied


class WriteThrough(dict[Any, Any]):
    """A moved dict: blocks that share one write into it for each other."""

    def __init__(self, moved: dict[Any, Any], origin: dict[Any, Any]) -> None:
        super().__init__(moved)
        self._origin = origin

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._origin[key] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


class BringHere:
    """Pre-hook of a module on one device."""

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self.device, self.copies = device, copies

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        on, device = self.copies.on, self.device
        moved = on(device, args)
        changed = None
        for name, value in kwargs.items():
            if value is not None and (new := on(device, value)) is not value:
                changed = changed or dict(kwargs)
                changed[name] = new
        return None if moved is args and changed is None else (moved, kwargs if changed is None else changed)


class BringToParts:
    """Pre-hook of a module on several devices: each argument to where it is read first."""

    def __init__(self, entry: torch.device, by_name: Mapping[str, torch.device], copies: Copies) -> None:
        self.entry, self.by_name, self.copies = entry, by_name, copies

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        moved = {
            name: value if name in HANDED_ON else self.copies.on(self.by_name.get(name, self.entry), value)
            for name, value in kwargs.items()
        }
        return self.copies.on(self.entry, args), moved


class Outermost(BringToParts):
    """Of the model itself. Its loss comes back to where its inputs were."""

    def __init__(self, entry: torch.device, by_name: Mapping[str, torch.device], copies: Copies) -> None:
        super().__init__(entry, by_name, copies)
        self.came_from: torch.device | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.copies.clear()
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self.came_from = next((value.device for value in given), None)
        return super().__call__(module, args, kwargs)


class Leave:
    """Hook behind the outermost forward."""

    def __init__(self, outermost: Outermost) -> None:
        self.outermost = outermost

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        self.outermost.copies.clear()
        device, self.outermost.came_from = self.outermost.came_from, None
        if output is None or device is None:
            return None
        if isinstance(loss := getattr(output, "loss", None), Tensor):
            if loss.device != device:
                output["loss"] = loss.to(device)
        elif type(output) is tuple and output and isinstance(output[0], Tensor) and output[0].dim() == 0:
            return (output[0].to(device), *output[1:])
        return None


def attach(model: nn.Module, device_of: Mapping[str, torch.device], blocks: Container[str]) -> None:
    """Put the hooks on a model whose tensors lie where they belong.

    Args:
        device_of: the device of every part.
        blocks: the parts that are blocks. They need no hook inside a module that lies on one device.
    """
    copies = Copies()
    everywhere = _devices_in("", device_of)
    outermost = Outermost(everywhere[0], _homes_of_labels(model, device_of), copies)
    model.register_forward_pre_hook(outermost, with_kwargs=True)
    model.register_forward_hook(Leave(outermost), with_kwargs=True, always_call=True)
    done = {id(model)}

    def visit(path: str, module: nn.Module, around: set[torch.device]) -> None:
        devices = _devices_in(path, device_of)
        if id(module) in done or not devices or (path in blocks and len(around) == 1):
            return
        here = set(devices)
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # those are not called
            done.add(id(module))
            hook = BringHere(devices[0], copies) if len(here) == 1 else BringToParts(devices[0], {}, copies)
            module.register_forward_pre_hook(hook, with_kwargs=True)
            around = here
        if path not in blocks:
            for name, child in module.named_children():
                visit(f"{path}.{name}" if path else name, child, around)

    if len(set(everywhere)) > 1:
        for name, child in model.named_children():
            visit(name, child, set(everywhere))
    elif (encoder := encoder_of(model)) is not None:  # generate() calls it by itself
        encoder.register_forward_pre_hook(BringHere(everywhere[0], copies), with_kwargs=True)


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The part that ``generate`` calls outside the model's forward."""
    get_encoder: Any = getattr(model, "get_encoder", None)
    encoder = None if get_encoder is None else get_encoder()
    return encoder if isinstance(encoder, nn.Module) and encoder is not model else None


def detach(model: nn.Module) -> None:
    """Take the hooks away again."""
    for module in model.modules():
        _forget(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        _forget(module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called)


def _forget(hooks: dict[int, Any], *flags: dict[int, bool]) -> None:
    for number in [number for number, hook in hooks.items() if isinstance(hook, (BringHere, BringToParts, Leave))]:
        for table in (hooks, *flags):
            table.pop(number, None)


def _devices_in(path: str, device_of: Mapping[str, torch.device]) -> list[torch.device]:
    """Of the parts in a module, in order."""
    return [device for part, device in device_of.items() if not path or part == path or part.startswith(f"{path}.")]


def _homes_of_labels(model: nn.Module, device_of: Mapping[str, torch.device]) -> dict[str, torch.device]:
    """Labels meet what the head computes."""
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    paths = [name for name, module in model.named_modules() if module is head and name in device_of]
    device = device_of[paths[0]] if paths else list(device_of.values())[-1]
    return dict.fromkeys(find_labels(type(model)), device)
