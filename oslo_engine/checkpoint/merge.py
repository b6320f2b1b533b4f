"""One process puts a split checkpoint together into what ``save_pretrained`` of the unsplit model would have written.

Only about one tensor is in memory at a time. Names, ties and conversions are those that were worked out when the checkpoint was
saved; the model is needed, as a skeleton, only where Transformers stores tensors in another form than the model has (experts).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel

from oslo_engine.checkpoint.atomic import abandoned_on_error, begin, commit, is_checkpoint_file
from oslo_engine.checkpoint.layout import Layout
from oslo_engine.checkpoint.names import Recipe, recipes_for_saving
from oslo_engine.checkpoint.safetensors_io import TensorSpec, write_safetensors
from oslo_engine.checkpoint.skeleton import META, meta_model
from oslo_engine.checkpoint.source import open_source
from oslo_engine.checkpoint.split import SplitSource
from oslo_engine.errors import CheckpointError


def merge(split_folder: str | Path, out_folder: str | Path, *, max_shard_size: int | str = "50GB") -> None:
    """Write the merged form of a split checkpoint. The config and everything else in the folder is copied.

    Args:
        max_shard_size: above it, several files and an index are written, as ``save_pretrained`` does.

    Raises:
        CheckpointError: a file of the split checkpoint is missing, damaged or altered; or the place to write to is no folder.
    """
    split_folder, out_folder = Path(split_folder), Path(out_folder)
    source = open_source(split_folder)
    if not isinstance(source, SplitSource):
        raise CheckpointError("this checkpoint is not split", where=str(split_folder), hint="copy it, or split it first")
    source.verify()
    with abandoned_on_error(out_folder):
        staging = begin(out_folder)
        for path in split_folder.iterdir():
            if path.is_file() and not is_checkpoint_file(path.name):
                shutil.copyfile(path, staging / path.name)
        write_merged(source, staging, max_shard_size=max_shard_size)
        commit(staging, out_folder)


def write_merged(
    source: SplitSource, folder: Path, *, max_shard_size: int | str, skeleton: PreTrainedModel | None = None
) -> None:
    """Write the files of the merged form into ``folder``.

    Args:
        skeleton: a model like the one that was saved; None to build one where it is needed, from the config in the folder.
    """
    if skeleton is None and any(tensor.converted for tensor in source.layout.tensors):
        skeleton = _skeleton(source)
    recipes = _recipes(source, skeleton)
    maker = _Maker(source, recipes, skeleton)
    specs = {name: spec for recipe in recipes for name, spec in recipe.outputs.items()}
    stand_ins = {name: torch.empty(spec.shape, dtype=spec.dtype, device=META) for name, spec in specs.items()}
    shards = split_torch_state_dict_into_shards(
        stand_ins, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file_name, names in shards.filename_to_tensors.items():
        write_safetensors(folder / file_name, {name: specs[name] for name in names}, maker.make)
    if shards.is_sharded:
        metadata = {"total_parameters": _num_parameters(source.layout), **shards.metadata}
        index = json.dumps({"metadata": metadata, "weight_map": shards.tensor_to_filename}, indent=2, sort_keys=True)
        (folder / "model.safetensors.index.json").write_text(index + "\n", encoding="utf-8")


class _Maker:
    """Makes the merged tensors one by one; what a conversion made besides the tensor asked for waits for its turn."""

    def __init__(self, source: SplitSource, recipes: list[Recipe], skeleton: PreTrainedModel | None) -> None:
        self.source, self.skeleton = source, skeleton
        self.recipe_of: Mapping[str, Recipe] = {name: recipe for recipe in recipes for name in recipe.outputs}
        self.waiting: dict[str, Tensor] = {}

    def make(self, name: str) -> Tensor:
        if name not in self.waiting:
            recipe = self.recipe_of[name]
            inputs = {key: self.source.read(key) for key in recipe.input_names()}
            if recipe.converter is None:
                return inputs[recipe.input_names()[0]]
            assert self.skeleton is not None
            self.waiting |= recipe.make(inputs, self.skeleton)
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


def _skeleton(source: SplitSource) -> PreTrainedModel:
    import transformers

    cls = getattr(transformers, source.layout.model, None)
    if cls is None or not (source.folder / "config.json").exists():
        raise CheckpointError(
            "converting the weights back to the form of Transformers needs the model class and its config",
            where=str(source.folder),
            expected=f"a config.json, and {source.layout.model} in transformers",
        )
    return meta_model(cls, cls.config_class.from_pretrained(source.folder))


def _num_parameters(layout: Layout) -> int:
    return sum(torch.Size(tensor.shape).numel() for tensor in layout.tensors if not tensor.is_buffer)
