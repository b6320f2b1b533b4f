"""From the names in a checkpoint to those of the model, as Transformers' ``from_pretrained`` finds them.

Base-model prefixes are added or removed; what Transformers registers for the model type is renamed (``LayerNorm.gamma``) or
converted (a list of experts to one weight). The registry and the operations are Transformers' own; here they are applied tensor
by tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, dot_natural_key

from oslo_engine.checkpoint.safetensors_io import TensorSpec
from oslo_engine.checkpoint.skeleton import META, meta_model, transformers_class
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.errors import CheckpointError
from oslo_engine.rewrite.state import parallel_state


@dataclass
class Recipe:
    """How some tensors of the one side are made of some of the other: a mere renaming, or a conversion of several.

    inputs: per pattern of the converter the names that it takes.
    outputs: the specs of what it makes; known before anything is read.
    renamings: applied to what the converter makes.
    """

    first_name: str
    converter: WeightConverter | None = None
    inputs: dict[str, list[str]] = field(default_factory=dict)
    outputs: dict[str, TensorSpec] = field(default_factory=dict)
    renamings: Sequence[WeightRenaming] = ()

    def input_names(self) -> list[str]:
        return [name for names in self.inputs.values() for name in names]

    def make(self, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Make the outputs from whole inputs.

        Raises:
            CheckpointError: the conversion does not fit the tensors.
        """
        if self.converter is None:
            return {self.first_name: tensors[self.input_names()[0]]}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.inputs.items():
            for name in names:
                converter.add_tensor(self.first_name, name, pattern, cast(Any, tensors[name]))
        try:
            made = converter.convert(self.first_name, model=_unsplit(model), config=model.config)
        except Exception as error:
            raise CheckpointError(
                "Transformers' conversion of these weights fails",
                where=", ".join(self.input_names()[:4]) + (", ..." if len(self.input_names()) > 4 else ""),
                expected=f"what {converter} takes",
                got=f"{type(error).__name__}: {error}",
            ) from error
        single = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        return {_rename_all(name, self.renamings): value for name, value in single.items()}


def _unsplit(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose parameters have their whole shapes, on meta: conversions look sizes up there."""
    if "_oslo" not in model.__dict__:
        return model
    state = parallel_state(model)
    if state.unsplit is None:
        state.unsplit = meta_model(transformers_class(type(model)), model.config, model.dtype)
    whole: PreTrainedModel = state.unsplit
    return whole


def recipes_for_loading(
    source: TensorSource, model: PreTrainedModel, expected: Collection[str]
) -> tuple[list[Recipe], list[Any]]:
    """How the tensors of ``source`` become those of ``model``.

    Args:
        expected: the names of the whole model, of all ranks.

    Returns:
        (recipes, the transforms of Transformers that were used: what ``save_pretrained`` reverts)
    """
    with as_transformers_class(model):
        transforms = [] if source.native else get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    recipes: dict[str, Recipe] = {}
    for key in _in_natural_order(source.names()):
        renamed, pattern, converter = _rename(key, renamings, converters)
        renamed = _with_base_prefix(renamed, prefix, expected)
        if renamed not in expected and key in expected:
            renamed, pattern, converter = _with_base_prefix(key, prefix, expected), None, None
        recipe = recipes.setdefault(renamed, Recipe(renamed, converter))
        recipe.inputs.setdefault(pattern or key, []).append(key)
    for recipe in recipes.values():
        if recipe.converter is None or recipe.first_name not in expected:
            recipe.outputs = {recipe.first_name: source.spec(recipe.input_names()[0])}
        else:
            recipe.outputs = _dry_run(recipe, source.spec, model)
    return list(recipes.values()), [entry for entry in transforms if entry.was_used()]


def recipes_for_saving(specs: Mapping[str, TensorSpec], model: PreTrainedModel) -> list[Recipe]:
    """How ``save_pretrained`` would write the tensors ``specs`` of a model: under which names, or converted back."""
    transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:  # not loaded from anywhere
        with as_transformers_class(model):
            transforms = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [entry for entry in transforms if not isinstance(entry, PrefixChange)]
        if not transforms:
            return [Recipe(name, None, {name: [name]}, {name: spec}) for name, spec in specs.items()]
    reverse = [entry.reverse_transform() for entry in transforms[::-1]]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    recipes: dict[str, Recipe] = {}
    for key in _in_natural_order(specs):
        renamed, pattern, converter = _rename(key, [], converters)
        if converter is None:
            renamed = _rename_all(key, renamings)
        recipe = recipes.setdefault(renamed, Recipe(renamed, converter))
        recipe.inputs.setdefault(pattern or key, []).append(key)
    for recipe in recipes.values():
        if recipe.converter is None:
            recipe.outputs = {recipe.first_name: specs[recipe.input_names()[0]]}
        else:
            recipe.renamings = renamings
            recipe.outputs = _dry_run(recipe, specs.__getitem__, model)
    return list(recipes.values())


def _dry_run(recipe: Recipe, spec_of: Callable[[str], TensorSpec], model: PreTrainedModel) -> dict[str, TensorSpec]:
    """What a conversion makes, tried without values."""
    specs = {name: spec_of(name) for name in recipe.input_names()}
    made = recipe.make({name: torch.empty(spec.shape, dtype=spec.dtype, device=META) for name, spec in specs.items()}, model)
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()}


def _rename(
    key: str, renamings: Sequence[WeightRenaming], converters: Sequence[WeightConverter]
) -> tuple[str, str | None, WeightConverter | None]:
    """All renamings that match, then at most one converter: (new name, the converter's pattern, the converter)."""
    key = _rename_all(key, renamings)
    for converter in converters:
        key, pattern = converter.rename_source_key(key)
        if pattern is not None:
            return key, pattern, converter
    return key, None, None


def _rename_all(key: str, renamings: Iterable[WeightRenaming]) -> str:
    for renaming in renamings:
        key, _ = renaming.rename_source_key(key)
    return key


def _with_base_prefix(key: str, prefix: str, expected: Collection[str]) -> str:
    """Load a base model's checkpoint into a model with a head, and the reverse."""
    if not prefix:
        return key
    if key.startswith(f"{prefix}.") and (short := key.removeprefix(f"{prefix}.")) in expected:
        return short
    return longer if (longer := f"{prefix}.{key}") in expected else key


def _in_natural_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=dot_natural_key)


@contextmanager
def as_transformers_class(model: PreTrainedModel) -> Iterator[None]:
    """Transformers looks conversions up by the name of the class, and leaves classes alone that are not its own."""
    ours = type(model)
    model.__class__ = transformers_class(ours)
    try:
        yield
    finally:
        model.__class__ = ours
