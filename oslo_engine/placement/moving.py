"""Moving the tensors of a model to the devices of its parts, and remembering where they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def tensors_by_name(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(full name, owner, attribute, tensor) of every parameter and buffer under each of its names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                if tensor is not None:
                    yield f"{path}.{leaf}" if path else leaf, module, leaf, tensor


def part_of(name: str, parts: Mapping[str, Any]) -> str:
    """The part that a tensor's name lies in: the longest path in front of it."""
    path = name
    while path not in parts:
        assert path, name
        path = path.rpartition(".")[0]
    return path


def move_tensors(model: nn.Module, device_of_tensor: Callable[[str], torch.device]) -> dict[str, torch.device]:
    """Move every parameter and buffer, with gradients; what was one tensor stays one.

    Args:
        device_of_tensor: by full name; the first name of a tied one decides.

    Returns:
        Where each was, by every name.
    """
    were: dict[str, torch.device] = {}
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # the old one too, so that no new tensor gets its id
    for name, owner, leaf, tensor in list(tensors_by_name(model)):
        was_on = moved[id(tensor)][0].device if id(tensor) in moved else tensor.device
        were[name] = was_on
        if id(tensor) not in moved:
            new = _moved(tensor, device_of_tensor(name))
            moved[id(tensor)] = tensor, new
            moved.setdefault(id(new), (tensor, new))
        table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
        table[leaf] = moved[id(tensor)][1]
    return were


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On a device. A parameter stays the same object, so that optimizers keep it, where torch can do that."""
    if tensor.device == device:
        return tensor
    with torch.no_grad():
        new = tensor.detach().to(device)
        if not isinstance(tensor, nn.Parameter):
            return new
        gradient = None if tensor.grad is None else tensor.grad.to(device)
        if torch._has_compatible_shallow_copy_type(tensor, new):
            tensor.grad = None
            tensor.data = new
            parameter = tensor
        else:
            parameter = nn.Parameter(new, tensor.requires_grad)
            parameter.__dict__.update(vars(tensor))
        parameter.grad = gradient
        return parameter
