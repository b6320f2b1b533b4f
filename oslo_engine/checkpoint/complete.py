"""Whether a checkpoint is whole, unaltered, and one of the model in its config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from oslo_engine.checkpoint.folder import Progress, model_of
from oslo_engine.checkpoint.source import open_source
from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.checkpoint.supply import Supplies, supplies_for, without
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.errors import CheckpointError
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.topology import Topology


def verify_folder(folder: Path, progress: Progress | None = None) -> TensorSource:
    """Check a checkpoint: its files, their checksums where it has them, and names and shapes by the model in its config.

    Args:
        progress: is told how many bytes of a split checkpoint were compared with their checksums.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: what is wrong first; it names the file or the tensor.
    """
    source = open_source(folder)
    model = model_of(folder, source)
    tensors = [tensor for tensor in plan_model(model, None, Topology()).plan.tensors if tensor.persistent]
    supplies = supplies_for(model, tensors, source)
    check_complete(supplies, made_by_class(supplies, model), folder, type(model).__name__)
    if isinstance(source, SplitSource):
        source.open_all()
        sizes = [source.layout.files[name].size_bytes for name in source.layout.file_names()]
        for part in range(len(sizes)):
            source.verify(part, len(sizes))
            if progress is not None:
                progress(sum(sizes[: part + 1]), sum(sizes))
    return source


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
