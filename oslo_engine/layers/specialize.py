"""Giving one module instance a behaviour of its own without losing what it is.

``isinstance``, ``repr``, state dict keys, hooks and deepcopy stay as they were: only the instance's class becomes a subclass of
its class under the same name.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_SUBCLASSES: dict[tuple[Any, ...], type] = {}


def specialize(module: nn.Module, mixin: type, **fields: Any) -> nn.Module:
    """Put ``mixin`` in front of the module's class and set ``fields`` on the instance.

    Args:
        module: changed in place and returned.
        mixin: a plain class; its methods may call ``super()``.
        fields: plain attributes (not parameters or modules), kept out of the state dict.
    """
    cls = type(module)
    key = (cls, mixin)
    if key not in _SUBCLASSES:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _SUBCLASSES[key] = type(cls.__name__, (mixin, cls), {**names, "_oslo_specializes": original_class(module)})
    module.__class__ = _SUBCLASSES[key]
    module.__dict__.update(fields)
    return module


def remove_specialization(module: nn.Module, mixins: tuple[type, ...]) -> None:
    """Take ``mixins`` out of the front of the module's class again, wherever they were put. Inverse: ``specialize``."""
    others, cls = [], type(module)
    while any(mixin in cls.__mro__ for mixin in mixins):
        mixin, cls = cls.__bases__
        if mixin not in mixins:
            others.append(mixin)
    module.__class__ = cls
    for mixin in reversed(others):
        specialize(module, mixin)


def original_class(module: nn.Module) -> type:
    """The class the module had before it was specialized."""
    return getattr(type(module), "_oslo_specializes", type(module))


def keeps_forward(module: nn.Module) -> bool:
    """Whether the module computes what its original class does: all that was put in front of it hands calls through."""
    cls = type(module)
    while cls is not original_class(module):
        if len(cls.__bases__) != 2:  # made in another way, for another computation
            return False
        mixin, cls = cls.__bases__
        if hasattr(mixin, "forward") and not getattr(mixin, "hands_through", False):
            return False
    return True
