"""What a number is called: expressions of config and module attributes that have its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from oslo_engine.plan.units import look_up

_FEATURES = ("in_features", "out_features", "nf", "nx")  # of linear layers: the engine keeps them right


def is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def names_of(model: PreTrainedModel, anchors: Sequence[nn.Module], number: int) -> list[str]:
    """Names that have this value where a policy looks them up: the module's own first, then those that configs have in common.

    Args:
        anchors: the region's module in the blocks that are alike; a name must have the value in each.
    """
    found = dict.fromkeys(_candidates(model, anchors[0]))
    return [name for name in found if all(look_up(model, [anchor], name) == number for anchor in anchors)]


def _candidates(model: PreTrainedModel, anchor: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in attributes_of(anchor) if "." not in name)
    configs: list[Any] = [model.config.get_text_config(), model.config]
    for config in configs:
        yield from getattr(config, "attribute_map", {})
    for config in [*configs, *([anchor.config] if hasattr(anchor, "config") else [])]:
        yield from (name for name, value in vars(config).items() if is_number(value))
    yield from (name for name, _ in attributes_of(anchor) if "." in name)


def attributes_of(anchor: nn.Module) -> Iterator[tuple[str, int]]:
    """(dotted name, value) of the whole numbers that the modules from here on keep."""
    for path, module in anchor.named_modules():
        for name, value in vars(module).items():
            if is_number(value) and name not in _FEATURES and not name.startswith("_"):
                yield (f"{path}.{name}" if path else name), value
