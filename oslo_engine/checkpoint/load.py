"""Loading a checkpoint into one rank's model: exactly the slices that this rank holds, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oslo_engine.checkpoint.names import Recipe, recipes_for_loading
from oslo_engine.checkpoint.place import find, place, slice_of
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.errors import CheckpointError, UnsupportedError
from oslo_engine.plan.plan import Plan, TensorPlan
from oslo_engine.topology import Coordinate


@dataclass(frozen=True)
class LoadReport:
    """What did not fit, for the whole model: the same on every rank.

    missing, unexpected: names that the checkpoint lacks, or has for nothing, without those that the model class expects to.
    mismatched: (name, shape in the checkpoint, shape in the model).
    uninitialized: first names of all tensors that got no value, for ``initialize_missing``.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    uninitialized: tuple[str, ...] = ()


@dataclass
class _Supply:
    """Where a tensor of the model comes from: outputs of recipes, the first of which is used."""

    recipes: list[Recipe] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def load_weights(
    model: PreTrainedModel,
    plan: Plan,
    at: Coordinate,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    ignore_mismatched_sizes: bool = False,
) -> LoadReport:
    """Give this rank's parameters and persistent buffers their values.

    Tensors that the checkpoint lacks stay on meta; see ``LoadReport.uninitialized``. Communicates nothing: every rank reads for
    itself, and finds the same faults.

    Args:
        model: rewritten by ``plan``: parameters on meta with this rank's shapes.
        dtype: what ``from_pretrained`` was asked for, which decides what the model class keeps in float32; other values take
            the types of the model's parameters.

    Raises:
        CheckpointError: a file is damaged, shapes differ (unless ``ignore_mismatched_sizes``), or tied names have two values.
        UnsupportedError: the checkpoint is quantized.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedError(
            "quantized checkpoints cannot be loaded split", where=type(model).__name__, hint="dequantize it first"
        )
    planned = [tensor for tensor in plan.tensors if tensor.persistent]
    expected = {alias: tensor for tensor in planned for alias in tensor.aliases}
    recipes, used = recipes_for_loading(source, model, expected)
    supplies: dict[str, _Supply] = {tensor.name: _Supply() for tensor in planned}
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
    if mismatched and not ignore_mismatched_sizes:
        raise _mismatch(mismatched)
    _load_all([tensor for tensor in planned if at.pp_rank in plan.holders(tensor)], supplies, model, at, source, device, dtype)
    if not source.native:
        vars(model)["_weight_conversions"] = used  # what save_pretrained reverts
    absent = [tensor for tensor in planned if not supplies[tensor.name].names]
    also_taken = {name for recipe in recipes if taken & _identities(source, recipe) for name in recipe.outputs}
    odd_shapes = {expected[name].name for name, _, _ in mismatched}
    return LoadReport(
        missing=_without({tensor.name for tensor in absent} - odd_shapes, model._keys_to_ignore_on_load_missing),
        unexpected=_without(unexpected - also_taken, _ignored_unexpected(model)),
        mismatched=tuple(mismatched),
        uninitialized=tuple(tensor.name for tensor in absent),
    )


def _load_all(
    held: list[TensorPlan],
    supplies: dict[str, _Supply],
    model: PreTrainedModel,
    at: Coordinate,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    in_float32 = _kept_in_float32(model, dtype)
    made: dict[int, dict[str, Tensor]] = {}  # what this rank still needs of a conversion of one tensor to several
    wanted = {name for tensor in held for name in supplies[tensor.name].names}
    for tensor in held:
        supply = supplies[tensor.name]
        if not supply.names:
            continue
        value = _value(supply.recipes[0], supply.names[0], tensor, at, source, model, made, wanted)
        for recipe, name in zip(supply.recipes[1:], supply.names[1:], strict=True):
            if _identities(source, recipe) == _identities(source, supply.recipes[0]):
                continue
            if not torch.equal(value, _value(recipe, name, tensor, at, source, model, made, wanted)):
                raise CheckpointError(
                    "tied parameters have different values in the checkpoint",
                    where=f"{supply.names[0]} and {name}",
                    expected="one value, as the config says (tie_word_embeddings)",
                    hint="load it with tie_word_embeddings=False in the config",
                )
        kept = torch.float32 if in_float32 is not None and in_float32.search(supply.names[0]) else find(model, tensor).dtype
        place(model, tensor, value.to(kept), device)


def _value(
    recipe: Recipe,
    name: str,
    tensor: TensorPlan,
    at: Coordinate,
    source: TensorSource,
    model: PreTrainedModel,
    made: dict[int, dict[str, Tensor]],
    wanted: set[str],
) -> Tensor:
    """This rank's slice of one output of a recipe."""
    if recipe.converter is None:
        (key,) = recipe.input_names()[:1]
        if tensor.shard is None:
            return source.read(key)
        return source.read(key, tensor.shard.dim, tensor.shard.spans[at.tp_rank])
    if name not in made.setdefault(id(recipe), {}):
        outputs = recipe.make({key: source.read(key) for key in recipe.input_names()}, model)
        made[id(recipe)] = {output: whole for output, whole in outputs.items() if output in wanted}
    whole, keep = made[id(recipe)].pop(name), slice_of(tensor, at.tp_rank)
    return whole.clone() if keep is None else keep.cut(whole)


def _identities(source: TensorSource, recipe: Recipe) -> set[object]:
    return {source.identity(name) for name in recipe.input_names()}


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """The names that the model class loads in float32 although ``dtype`` is smaller (T5's ``wo``), as a pattern."""
    patterns = model._get_dtype_plan(model.dtype if dtype is None else dtype)
    return re.compile("|".join(pattern.replace("*", r".*") for pattern in patterns)) if patterns else None


def _ignored_unexpected(model: PreTrainedModel) -> set[str]:
    """Patterns of names that old checkpoints have for nothing."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def _without(names: Iterable[str], patterns: Collection[str] | None) -> tuple[str, ...]:
    ignored = re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None
    return tuple(sorted(name for name in names if ignored is None or not ignored.search(name)))


def _mismatch(mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> CheckpointError:
    name, found, wanted = mismatched[0]
    return CheckpointError(
        f"the checkpoint has other shapes than the model ({len(mismatched)} tensors)",
        where=name,
        expected=wanted,
        got=found,
        hint="check the config; or pass ignore_mismatched_sizes=True to initialise these tensors anew",
    )
