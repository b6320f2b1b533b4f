"""One process puts a split checkpoint together into what ``save_pretrained`` of the unsplit model would have written.

Nothing but what is converted is ever in memory as a whole. Names, ties and conversions are those that were worked out when the
checkpoint was saved; the model is needed, as a skeleton, only where Transformers stores tensors in another form than the model
has (experts).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel

from oslo_engine.checkpoint.atomic import MANIFEST
from oslo_engine.checkpoint.checksums import find_difference
from oslo_engine.checkpoint.folder import CONFIG, Progress, Verification, check_target, model_of, other_files, replacing
from oslo_engine.checkpoint.layout import Layout
from oslo_engine.checkpoint.names import Recipe, recipes_for_saving
from oslo_engine.checkpoint.safetensors_io import SafetensorsWriter, TensorSpec, size_of_file, write_order
from oslo_engine.checkpoint.skeleton import META
from oslo_engine.checkpoint.source import open_source
from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.checkpoint.stream import Copier, whole_into
from oslo_engine.errors import CheckpointError
from oslo_engine.rewrite.planning import plan_model
from oslo_engine.topology import Topology


def merge(
    split_folder: str | Path,
    out_folder: str | Path,
    *,
    max_shard_size: int | str = "50GB",
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write the merged form of a split checkpoint. The config and everything else in the folder is copied.

    Args:
        max_shard_size: above it, several files and an index are written, as ``save_pretrained`` does.
        overwrite: whether a checkpoint that is there may be replaced.
        dry_run: write nothing.
        progress: is told how far it is.

    Returns:
        The names and sizes of the files, without an index.

    Raises:
        CheckpointError: a file of the split checkpoint is missing, damaged or altered; or the target is no folder or has a
            checkpoint.
    """
    split_folder, out_folder = Path(split_folder), Path(out_folder)
    check_target(split_folder, out_folder, overwrite=overwrite)
    source = open_source(split_folder)
    if not isinstance(source, SplitSource):
        raise CheckpointError("this checkpoint is not split", where=str(split_folder), hint="copy it, or split it first")
    source.check_configs()
    source.open_all()
    _check_config(source)
    merged = Merged(source, max_shard_size=max_shard_size)
    rest = other_files(split_folder)
    sizes = merged.sizes() | {path.name: path.stat().st_size for path in rest}
    if not dry_run:
        num_bytes = sum(spec.num_bytes for spec in merged.specs.values())
        with (
            Verification(source) as verification,
            replacing(split_folder, out_folder, verification, num_bytes, progress, overwrite=overwrite) as (staging, written),
        ):
            merged.write(staging, written)
    return sizes


def _check_config(source: SplitSource) -> None:
    """That a config which was edited since still describes what was saved: with it the merged form will be loaded."""
    path, record = source.folder / CONFIG, source.layout.configs.get(CONFIG)
    if not path.is_file() or (record is not None and find_difference(path, record) is None):
        return
    model = model_of(source.folder, source)
    wanted = {
        frozenset(tensor.aliases): tensor.shape
        for tensor in plan_model(model, None, Topology()).plan.tensors
        if tensor.persistent
    }
    found = {frozenset(tensor.aliases): tensor.shape for tensor in source.layout.tensors}
    if wanted != found:
        names, shape = min((set(wanted.items()) ^ set(found.items())), key=lambda item: sorted(item[0]))
        raise CheckpointError(
            "the config was edited, and is one of another model than was saved",
            where=str(path),
            expected=f"tensors, shapes and ties as in {MANIFEST}",
            got=f"{' = '.join(sorted(names))}, {shape}: only in the " + ("model" if names in wanted else "checkpoint"),
            hint="put the config back, or first make a split checkpoint of this model: oslo-engine checkpoint reshard",
        )


class Merged:
    """The merged form of a split checkpoint.

    Args:
        skeleton: a model like the one that was saved; None to build one where it is needed, from the config in the folder.

    Attributes:
        specs: its tensors.
    """

    def __init__(self, source: SplitSource, *, max_shard_size: int | str, skeleton: PreTrainedModel | None = None) -> None:
        if skeleton is None and any(tensor.converted for tensor in source.layout.tensors):
            skeleton = model_of(source.folder, source)
        recipes = _recipes(source, skeleton)
        self.specs: dict[str, TensorSpec] = {name: spec for recipe in recipes for name, spec in recipe.outputs.items()}
        self._source, self._maker = source, _Maker(source, recipes, skeleton)
        stand_ins = {name: torch.empty(spec.shape, dtype=spec.dtype, device=META) for name, spec in self.specs.items()}
        try:
            if max_shard_size == 0 or str(max_shard_size).startswith("-"):
                raise ValueError("it must be positive")
            self._shards = split_torch_state_dict_into_shards(
                stand_ins, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
            )
        except ValueError as error:
            raise CheckpointError(
                "no such size of files", where="max_shard_size", expected="5GB, 200MB, ...", got=f"{max_shard_size!r}: {error}"
            ) from None

    def sizes(self) -> dict[str, int]:
        """By file."""
        return {name: size_of_file(self._specs_in(name)) for name in self._shards.filename_to_tensors}

    def write(self, folder: Path, written: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Write the files, and an index where there are several.

        Args:
            written: is told how many bytes were written since it was last told.
        """
        copier = Copier(self._source, written)
        with contextlib.ExitStack() as opened:
            finished = []
            for file_name in self._shards.filename_to_tensors:
                specs = self._specs_in(file_name)
                writer = opened.enter_context(SafetensorsWriter(folder / file_name, specs, algorithms=()))
                for name in write_order(specs):
                    stored, target = self._maker.stored(name), whole_into(writer, specs[name])
                    if stored is not None:
                        copier.copy(stored, [target])
                    else:
                        copier.copy_whole(self._maker.make(name), [target])
                finished.append(writer.finish())
            for each in finished:
                each.result()
        if self._shards.is_sharded:
            metadata = {"total_parameters": _num_parameters(self._source.layout), **self._shards.metadata}
            index = {"metadata": metadata, "weight_map": self._shards.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _specs_in(self, file_name: str) -> dict[str, TensorSpec]:
        return {name: self.specs[name] for name in self._shards.filename_to_tensors[file_name]}


class _Maker:
    """Makes the merged tensors that are converted; what a conversion made besides the tensor asked for waits for its turn."""

    def __init__(self, source: SplitSource, recipes: list[Recipe], skeleton: PreTrainedModel | None) -> None:
        self.source, self.skeleton = source, skeleton
        self.recipe_of: Mapping[str, Recipe] = {name: recipe for recipe in recipes for name in recipe.outputs}
        self.waiting: dict[str, Tensor] = {}

    def stored(self, name: str) -> str | None:
        """The name under which the source has just this tensor; None if it must be made."""
        recipe = self.recipe_of[name]
        return recipe.input_names()[0] if recipe.converter is None else None

    def make(self, name: str) -> Tensor:
        if name not in self.waiting:
            recipe = self.recipe_of[name]
            assert self.skeleton is not None
            self.waiting |= recipe.make({key: self.source.read(key) for key in recipe.input_names()}, self.skeleton)
        return self.waiting.pop(name)


def _recipes(source: SplitSource, skeleton: PreTrainedModel | None) -> list[Recipe]:
    tensors = source.layout.tensors
    recipes = [
        Recipe(tensor.merged_name, None, {tensor.name: [tensor.name]}, {tensor.merged_name: tensor.spec})
        for tensor in tensors
        if tensor.merged_name is not None
    ]
    converted: dict[str, TensorSpec] = {tensor.name: tensor.spec for tensor in tensors if tensor.converted}
    if converted:
        assert skeleton is not None
        recipes += recipes_for_saving(converted, skeleton)
    return recipes


def _num_parameters(layout: Layout) -> int:
    return sum(torch.Size(tensor.shape).numel() for tensor in layout.tensors if not tensor.is_buffer)
