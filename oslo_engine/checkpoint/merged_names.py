"""Which name each tensor of a split checkpoint has in a merged one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from transformers import PreTrainedModel

from oslo_engine.checkpoint.layout import Layout, TensorLayout
from oslo_engine.checkpoint.names import recipes_for_saving
from oslo_engine.errors import CheckpointError


def with_merged_names(layout: Layout, model: PreTrainedModel) -> Layout:
    """Say for every tensor under which name ``save_pretrained`` would write it, or that it would convert it."""
    tied = [re.compile(pattern) for pattern in _tied_patterns(model)]
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for tensor in layout.tensors if (name := _kept_name(tensor, tied, ignored)) is not None}
    recipes = recipes_for_saving({name: tensor.spec for name, tensor in kept.items()}, model)
    merged = {recipe.input_names()[0]: recipe.first_name for recipe in recipes if recipe.converter is None}
    name_of = {tensor.name: name for name, tensor in kept.items()}

    def with_name(tensor: TensorLayout) -> TensorLayout:
        name = name_of.get(tensor.name)
        return dataclasses.replace(
            tensor, merged_name=None if name is None else merged.get(name), converted=name is not None and name not in merged
        )

    return dataclasses.replace(layout, tensors=tuple(map(with_name, layout.tensors)))


def _tied_patterns(model: PreTrainedModel) -> Iterator[str]:
    for path, module in model.named_modules():
        for pattern in getattr(module, "_tied_weights_keys", None) or ():
            yield f"{path}.{pattern}" if path else pattern


def _kept_name(tensor: TensorLayout, tied: list[re.Pattern[str]], ignored: set[str]) -> str | None:
    """The one of its names under which ``save_pretrained`` writes a tensor: not those that are declared as tied to another."""
    names = sorted(alias for alias in tensor.aliases if alias not in ignored)
    dropped = [name for name in names if any(pattern.search(name) for pattern in tied)]
    if len(dropped) == len(names):
        dropped = dropped[:-1]
    left = [name for name in names if name not in dropped]
    if len(left) > 1:
        raise CheckpointError(
            "parameters are tied that the model class does not declare as tied",
            where=", ".join(left),
            expected="an entry in _tied_weights_keys of the model class",
        )
    return left[0] if left else None
