"""Models without weights: parameters on ``meta``, buffers and everything else real.

The constructor itself runs, so non-persistent buffers (rotary frequencies, position ids) and plain tensor attributes have their
true values, at the price of neither the memory nor the time of the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PretrainedConfig, PreTrainedModel

from oslo_engine.errors import UnsupportedError

META = torch.device("meta")


def meta_model(cls: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Construct ``cls(config)`` with its parameters on ``meta``; ties as in the real model; the random state is left alone.

    Args:
        dtype: of the parameters; None for the config's.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), on_registration(as_meta):
        return cls._from_config(config, **({} if dtype is None else {"dtype": dtype}))


def materialize_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give the buffers of a whole model that was built on ``meta`` the values that its constructor computes.

    Plain tensor attributes that landed on ``meta`` are replaced too. Buffers that are not on ``meta`` are only moved.

    Raises:
        UnsupportedError: the constructor makes other buffers than the model has.
    """
    if any(buffer.is_meta for buffer in model.buffers()):
        twin = meta_model(transformers_class(type(model)), model.config, model.dtype)
        twin_modules = dict(twin.named_modules(remove_duplicate=False))
        for name, module in model.named_modules(remove_duplicate=False):
            _take_tensors(module, twin_modules.get(name), name)
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))


def _take_tensors(module: nn.Module, twin: nn.Module | None, where: str) -> None:
    for table in ("_buffers", "__dict__"):
        values, twin_values = getattr(module, table), getattr(twin, table, {})
        for name, value in list(values.items()):
            if not isinstance(value, Tensor) or not value.is_meta:
                continue
            computed = twin_values.get(name)
            if table == "_buffers" and (computed is None or computed.shape != value.shape):
                raise UnsupportedError(
                    "cannot find out the value of a buffer that is on meta",
                    where=f"{where}.{name}",
                    expected=f"a buffer of shape {tuple(value.shape)} in a newly constructed model",
                    got="none" if computed is None else str(tuple(computed.shape)),
                    hint="build the model on the CPU, or use from_config_with_parallel",
                )
            if isinstance(computed, Tensor) and not computed.is_meta:
                values[name] = computed.to(value.dtype)


def transformers_class(cls: type) -> type[PreTrainedModel]:
    """The model class without what oslo_engine adds to it."""
    return next(base for base in cls.__mro__ if not base.__module__.startswith("oslo_engine"))


def as_meta(parameter: nn.Parameter) -> nn.Parameter:
    """The same parameter, its Python attributes included, without values."""
    if parameter.is_meta:
        return parameter
    shadow = nn.Parameter(
        torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=META), parameter.requires_grad
    )
    shadow.__dict__.update(vars(parameter))
    return shadow


@contextlib.contextmanager
def on_registration(replace: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Let ``replace`` decide what every parameter becomes that a module registers meanwhile."""
    hook = register_module_parameter_registration_hook(cast(Any, lambda module, name, parameter: replace(parameter)))
    try:
        yield
    finally:
        hook.remove()
