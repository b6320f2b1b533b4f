"""Loading a checkpoint into one rank's model: exactly the slices that this rank holds, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from oslo_engine.checkpoint.place import find, place
from oslo_engine.checkpoint.supply import Supplier, Supplies, supplies_for, without
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.errors import CheckpointError, UnsupportedError
from oslo_engine.plan.plan import Plan
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
    supplies = supplies_for(model, [tensor for tensor in plan.tensors if tensor.persistent], source)
    if supplies.mismatched and not ignore_mismatched_sizes:
        raise _mismatch(supplies.mismatched)
    _load_all(supplies, model, plan, at, source, device, dtype)
    if not source.native:
        vars(model)["_weight_conversions"] = supplies.transforms  # what save_pretrained reverts
    odd_shapes = {name for name, _, _ in supplies.mismatched}
    missing = {tensor.name for tensor in supplies.absent if not odd_shapes & set(tensor.aliases)}
    return LoadReport(
        missing=without(missing, model._keys_to_ignore_on_load_missing),
        unexpected=supplies.unexpected,
        mismatched=supplies.mismatched,
        uninitialized=tuple(tensor.name for tensor in supplies.absent),
    )


def _load_all(
    supplies: Supplies,
    model: PreTrainedModel,
    plan: Plan,
    at: Coordinate,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    in_float32 = _kept_in_float32(model, dtype)
    held = [tensor for tensor in plan.held_by(at.pp_rank) if tensor.persistent]
    supplier = Supplier(source, model, {name for tensor in held for name in supplies.of[tensor.name].names})
    for tensor in held:
        supply = supplies.of[tensor.name]
        if not supply.names:
            continue
        part = () if tensor.shard is None else (tensor.shard.dim, tensor.shard.spans[at.tp_rank])
        value = supplier.give(supply, *part)
        kept = torch.float32 if in_float32 is not None and in_float32.search(supply.names[0]) else find(model, tensor).dtype
        place(model, tensor, value.to(kept), device)


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """The names that the model class loads in float32 although ``dtype`` is smaller (T5's ``wo``), as a pattern."""
    patterns = model._get_dtype_plan(model.dtype if dtype is None else dtype)
    return re.compile("|".join(pattern.replace("*", r".*") for pattern in patterns)) if patterns else None


def _mismatch(mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> CheckpointError:
    name, found, wanted = mismatched[0]
    return CheckpointError(
        f"the checkpoint has other shapes than the model ({len(mismatched)} tensors)",
        where=name,
        expected=wanted,
        got=found,
        hint="check the config; or pass ignore_mismatched_sizes=True to initialise these tensors anew",
    )
