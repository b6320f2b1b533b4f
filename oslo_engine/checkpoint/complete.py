"""Whether a checkpoint has just the tensors of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from oslo_engine.checkpoint.supply import Supplies, without
from oslo_engine.errors import CheckpointError


def made_by_class(supplies: Supplies, model: PreTrainedModel) -> set[str]:
    """The absent tensors that checkpoints need not have, since the model class can make them (sinusoids)."""
    not_saved = set(model._keys_to_ignore_on_save or ())
    needed = set(without((tensor.name for tensor in supplies.absent), model._keys_to_ignore_on_load_missing))
    return {tensor.name for tensor in supplies.absent if not_saved & set(tensor.aliases) or tensor.name not in needed}


def check_complete(supplies: Supplies, made: set[str], folder: Path, model: str) -> None:
    """Refuse a checkpoint that is not exactly one of this model.

    Args:
        made: tensors that it may lack.

    Raises:
        CheckpointError: with the first tensor that is missing, too many, or of another shape.
    """
    for name, found, wanted in supplies.mismatched:
        raise CheckpointError(
            f"a tensor of the checkpoint has not the shape that it has in {model}",
            where=f"{folder}: {name}",
            expected=wanted,
            got=found,
            hint="is the config.json that of this checkpoint?",
        )
    missing = [tensor.name for tensor in supplies.absent if tensor.name not in made]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks tensors of {model}",
            where=f"{folder}: {_some(missing)}",
            expected="every tensor of the model",
            got=f"{len(missing)} are missing",
            hint="is the config.json that of this checkpoint?",
        )
    if supplies.unexpected:
        raise CheckpointError(
            f"the checkpoint has tensors that {model} does not have",
            where=f"{folder}: {_some(supplies.unexpected)}",
            got=f"{len(supplies.unexpected)} too many",
            hint="load it with Transformers and save it, which leaves them out",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")
