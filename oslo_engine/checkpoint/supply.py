"""Where the tensors of a model come from: what a checkpoint has for each of them, and what does not fit."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oslo_engine.checkpoint.names import Recipe, recipes_for_loading
from oslo_engine.checkpoint.ranges import CHUNK_BYTES
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.errors import CheckpointError
from oslo_engine.plan.plan import TensorPlan
from oslo_engine.shards import Span


@dataclass
class Supply:
    """Outputs of recipes that are all one tensor of the model (of tied names there may be several); the first is used."""

    recipes: list[Recipe] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return self.recipes[0].outputs[self.names[0]].dtype


@dataclass(frozen=True)
class Supplies:
    """What a checkpoint has for a model.

    of: the supply of each tensor, by its first name; empty where the checkpoint has none.
    absent: the tensors that get none.
    unexpected: names that the model has no use for, without those that its class expects to find.
    mismatched: (name, shape in the checkpoint, shape in the model).
    transforms: those of Transformers that were used: what ``save_pretrained`` reverts.
    """

    of: dict[str, Supply]
    absent: tuple[TensorPlan, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    transforms: list[Any]


def supplies_for(model: PreTrainedModel, tensors: Sequence[TensorPlan], source: TensorSource) -> Supplies:
    """Match a checkpoint with a model; only headers are read.

    Args:
        tensors: the persistent ones of the plan, of all ranks.
    """
    expected = {alias: tensor for tensor in tensors for alias in tensor.aliases}
    recipes, transforms = recipes_for_loading(source, model, expected)
    supplies: dict[str, Supply] = {tensor.name: Supply() for tensor in tensors}
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    unexpected: set[str] = set()
    taken: set[object] = set()
    for recipe in recipes:
        for name, spec in recipe.outputs.items():
            tensor = expected.get(name)
            if tensor is None:
                unexpected.add(name)
                continue
            taken |= _identities(source, recipe)
            if spec.shape != tensor.shape:
                mismatched.append((name, spec.shape, tensor.shape))
            else:
                supplies[tensor.name].recipes.append(recipe)
                supplies[tensor.name].names.append(name)
    also_taken = {name for recipe in recipes if taken & _identities(source, recipe) for name in recipe.outputs}
    return Supplies(
        of=supplies,
        absent=tuple(tensor for tensor in tensors if not supplies[tensor.name].names),
        unexpected=without(unexpected - also_taken, _ignored_unexpected(model)),
        mismatched=tuple(mismatched),
        transforms=transforms,
    )


class Supplier:
    """Gives the tensors of a model, or slices of them, one after another.

    Args:
        wanted: the names that will be asked for; of a conversion that makes several tensors, the others are dropped.
    """

    def __init__(self, source: TensorSource, model: PreTrainedModel, wanted: Collection[str]) -> None:
        self._source, self._model, self._wanted = source, model, set(wanted)
        self._made: dict[int, dict[str, Tensor]] = {}

    def give(self, supply: Supply, dim: int | None = None, spans: Sequence[Span] | None = None) -> Tensor:
        """A tensor, or the concatenation of ``spans`` along ``dim`` of it, in memory of its own.

        Raises:
            CheckpointError: tied names have different values.
        """
        value = self._value(supply.recipes[0], supply.names[0], dim, spans)
        for recipe, name in self._others(supply):
            if not torch.equal(value, self._value(recipe, name, dim, spans)):
                raise _not_tied(supply.names[0], name)
        return value

    def stored(self, supply: Supply) -> str | None:
        """The name under which the source has just this tensor; None if a conversion makes it.

        Raises:
            CheckpointError: tied names have different values.
        """
        if any(recipe.converter is not None for recipe in supply.recipes):
            return None
        first = supply.recipes[0].input_names()[0]
        for recipe, name in self._others(supply):
            if not self._are_equal(first, recipe.input_names()[0]):
                raise _not_tied(supply.names[0], name)
        return first

    def _others(self, supply: Supply) -> list[tuple[Recipe, str]]:
        """Those that are not the first once more."""
        first = _identities(self._source, supply.recipes[0])
        others = zip(supply.recipes[1:], supply.names[1:], strict=True)
        return [(recipe, name) for recipe, name in others if _identities(self._source, recipe) != first]

    def _are_equal(self, first: str, second: str) -> bool:
        spec = self._source.spec(first)
        size = spec.shape[0] if spec.shape else 1
        step = max(1, CHUNK_BYTES * size // max(1, spec.num_bytes))
        spans = [(start, min(start + step, size)) for start in range(0, size, step)]
        return all(torch.equal(self._source.read(first, 0, [s]), self._source.read(second, 0, [s])) for s in spans)

    def _value(self, recipe: Recipe, name: str, dim: int | None, spans: Sequence[Span] | None) -> Tensor:
        if recipe.converter is None:
            return self._source.read(recipe.input_names()[0], dim, spans)
        if name not in self._made.setdefault(id(recipe), {}):
            outputs = recipe.make({key: self._source.read(key) for key in recipe.input_names()}, self._model)
            self._made[id(recipe)] = {output: whole for output, whole in outputs.items() if output in self._wanted}
        whole = self._made[id(recipe)].pop(name)
        if dim is None or spans is None:
            alone = whole.is_contiguous() and whole.untyped_storage().nbytes() == whole.nbytes
            return whole if alone else whole.clone(memory_format=torch.contiguous_format)
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in spans], dim)


def _not_tied(first: str, second: str) -> CheckpointError:
    return CheckpointError(
        "tied parameters have different values in the checkpoint",
        where=f"{first} and {second}",
        expected="one value, as the config says (tie_word_embeddings)",
        hint="load it with tie_word_embeddings=False in the config",
    )


def without(names: Iterable[str], patterns: Collection[str] | None) -> tuple[str, ...]:
    """Those of the names in which none of the patterns is found, sorted."""
    ignored = re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None
    return tuple(sorted(name for name in names if ignored is None or not ignored.search(name)))


def _identities(source: TensorSource, recipe: Recipe) -> set[object]:
    return {source.identity(name) for name in recipe.input_names()}


def _ignored_unexpected(model: PreTrainedModel) -> set[str]:
    """Patterns of names that old checkpoints have for nothing."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns
