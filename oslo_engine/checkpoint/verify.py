"""Whether a checkpoint is whole, unaltered, and one of the model in its config."""

from __future__ import annotations

from pathlib import Path

from oslo_engine.checkpoint.checksums import check_unaltered
from oslo_engine.checkpoint.complete import check_complete, made_by_class
from oslo_engine.checkpoint.folder import Progress, model_of
from oslo_engine.checkpoint.resume import check_file, read_record
from oslo_engine.checkpoint.source import open_source
from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.checkpoint.supply import Supplier, supplies_for
from oslo_engine.checkpoint.tensors import TensorSource
from oslo_engine.checkpoint.training import GENERATORS, OBJECTS, OPTIMIZER, RECORD
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.topology import Topology


def verify_folder(folder: Path, progress: Progress | None = None) -> TensorSource:
    """Check a checkpoint: its files, all their checksums where it has them, names and shapes by the model in its config, and
    that tied values are equal.

    Of a training that was saved, the files of the optimizer, the objects and the generators too.

    Args:
        progress: is told how many bytes were compared with their checksums.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: what is wrong first; it names the file or the tensor.
    """
    source = open_source(folder)
    if isinstance(source, SplitSource):
        _check_configs(source)
    model = model_of(folder, source)
    tensors = [tensor for tensor in plan_model(model, None, Topology()).plan.tensors if tensor.persistent]
    supplies = supplies_for(model, tensors, source)
    check_complete(supplies, made_by_class(supplies, model), folder, type(model).__name__)
    supplier = Supplier(source, model, ())
    for supply in supplies.of.values():
        if len(supply.names) > 1:
            supplier.stored(supply)
    checked = [source, *_open_training(folder)] if isinstance(source, SplitSource) else []
    files = [(each, number) for each in checked for number in range(len(each.layout.file_names()))]
    sizes = [each.layout.files[each.layout.file_names()[number]].size_bytes for each, number in files]
    done = 0
    for each in checked:
        each.open_all()
    for (each, number), size in zip(files, sizes, strict=True):
        each.verify(number, len(each.layout.file_names()), thorough=True)
        done += size
        if progress is not None:
            progress(done, sum(sizes))
    return source


def _check_configs(source: SplitSource) -> None:
    hint = "copy it again; if the change was meant, checkpoint reshard writes the same weights with a new checksum"
    for name, record in source.layout.configs.items():
        check_unaltered(source.folder / name, record, "a config", thorough=True, hint=hint)


def _open_training(folder: Path) -> list[SplitSource]:
    """What a training keeps in the form of a split checkpoint, its optimizer; its other files are checked here."""
    if not any(any(folder.glob(name)) for name in (RECORD, OPTIMIZER, OBJECTS, GENERATORS.format(rank="*"))):
        return []
    record = read_record(folder)
    for name in record["files"]:
        check_file(folder / name, record, thorough=True)
    return [] if record["optimizer"] is None else [SplitSource(folder, OPTIMIZER)]
