"""What the user asks to be fused: names of kinds of places, or classes of modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from oslo_engine.errors import FusionTargetError
from oslo_engine.layers.specialize import original_class

NAMES = {
    "mlp": ("bias_gelu", "glu", "bias_dropout_residual"),
    "attention": ("scale_mask_softmax", "rotary", "bias_dropout_residual"),
    "norm": ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"),
    "loss": ("cross_entropy",),
}


@dataclass(frozen=True)
class Targets:
    """kernels: wanted in the whole model. classes: modules whose results all may take in. asked: both, in the user's words."""

    kernels: frozenset[str]
    classes: tuple[type, ...]
    asked: tuple[str, ...]


def parse_targets(model: nn.Module, targets: Any) -> Targets:
    """Understand the ``targets`` of ``fuse``.

    Args:
        targets: None or True for everything; a name of ``NAMES``, a class of modules, or a list of these.

    Raises:
        FusionTargetError: a name that there is not, or a class of which the model has no module.
    """
    everything = frozenset(kernel for kernels in NAMES.values() for kernel in kernels)
    if targets is None or targets is True:
        return Targets(everything, (), ())
    asked = [targets] if isinstance(targets, (str, type)) else list(targets) if isinstance(targets, Iterable) else [targets]
    if not asked:
        raise _wrong(model, "an empty list of targets fuses nothing", "[]")
    kernels: set[str] = set()
    classes: list[type] = []
    for each in asked:
        if isinstance(each, str) and each in NAMES:
            kernels.update(NAMES[each])
        elif isinstance(each, type) and any(isinstance(module, each) for module in model.modules()):
            classes.append(each)
        else:
            name = each.__name__ if isinstance(each, type) else repr(each)
            raise _wrong(model, "this model has no such target", name)
    shown = tuple(each.__name__ if isinstance(each, type) else each for each in asked)
    return Targets(frozenset(kernels), tuple(classes), shown)


def _wrong(model: nn.Module, what: str, got: str) -> FusionTargetError:
    found = dict.fromkeys(original_class(module).__name__ for module in model.modules() if module is not model)
    own = [name for name in found if not hasattr(nn, name)]
    expected = f"names: {', '.join(NAMES)}; classes of {type(model).__name__}: {', '.join(own)}"
    return FusionTargetError(what, where="fuse(targets)", expected=expected, got=got)
