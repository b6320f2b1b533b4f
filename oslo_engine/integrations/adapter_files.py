"""Saving the adapters of a split model in the files that PEFT writes for the whole one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oslo_engine.checkpoint.agree import together
from oslo_engine.checkpoint.atomic import abandoned_on_error, begin, commit
from oslo_engine.checkpoint.save import leads, local_tensor
from oslo_engine.checkpoint.skeleton import transformers_class
from oslo_engine.errors import CheckpointError
from oslo_engine.integrations.peft import meet_adapters
from oslo_engine.rewrite.gradients import Answer, answer_for
from oslo_engine.rewrite.state import ParallelState, parallel_state

WHAT = "saving the adapters"
_PREFIX = "base_model.model."  # that PEFT's wrapper gives to names


def save_adapters(
    model: PreTrainedModel,
    directory: str | Path,
    *,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: bool | str = "auto",
) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``; adapters that are not "default" into their own folders.

    Args: as of PEFT's ``save_pretrained``.

    Raises:
        CheckpointError: some rank cannot write, or does not hold what its plan says.

    Communication: all-gathers of the adapters over all ranks.
    """
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors.torch import save_file

    target, state = Path(directory), parallel_state(model)
    meet_adapters(model)
    configs = model.__dict__["peft_config"]
    names = list(configs) if selected_adapters is None else selected_adapters
    whole = {name: _whole(model, state, name, save_embedding_layers) for name in names}

    def write() -> None:
        staging = begin(target)
        for name, tensors in whole.items():
            folder = staging if name == "default" else staging / name
            folder.mkdir(exist_ok=True)
            save_file(tensors, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
            _write_config(model, configs[name], folder)
        commit(staging, target)

    with abandoned_on_error(target, here=leads(state)):
        together(lambda: write() if leads(state) else None, what=WHAT)


def _whole(model: PreTrainedModel, state: ParallelState, adapter: str, embeddings: bool | str) -> dict[str, Tensor]:
    """What PEFT would save of the whole model, by the names in its file."""
    parts = together(lambda: _here(model, state, adapter, embeddings), what=WHAT)
    found: dict[str, dict[int, Tensor]] = {}
    names: dict[str, str] = {}
    for of_rank in parts:
        for key, (name, tp_rank, value) in of_rank.items():
            found.setdefault(key, {})[tp_rank] = value
            names[key] = name
    whole = {}
    for key, values in found.items():
        shard = state.plan.tensor(names[key]).shard
        whole[_PREFIX + key] = values[0] if shard is None else shard.undo([values[rank] for rank in range(shard.num_ranks)])
    return whole


def _here(
    model: PreTrainedModel, state: ParallelState, adapter: str, embeddings: bool | str
) -> dict[str, tuple[str, int, Tensor]]:
    """(name in the model, tp rank, value) of what this rank has to give, by the names in the file."""
    from peft import get_peft_model_state_dict

    at = state.mesh.at
    local = nn.Module.state_dict(model)
    name_of = {id(value): name for name, value in local.items()}
    selected = get_peft_model_state_dict(model, local, adapter, save_embedding_layers=embeddings)  # type: ignore[arg-type]
    given = {}
    for key, value in selected.items():
        name = name_of[id(value)]
        tensor, own = state.plan.tensor(name), local_tensor(value)  # gathers on every data-parallel rank
        if tuple(own.shape) != tensor.local_shape(at.tp_rank):
            raise CheckpointError(
                "an adapter is not what its plan says",
                where=name,
                expected=str(tensor.local_shape(at.tp_rank)),
                got=str(tuple(own.shape)),
                hint="parameters that an optimizer has divided (ZeRO 3) must be gathered first",
            )
        if at.dp_rank == 0 and answer_for(state, name) is not Answer.NOTHING:
            given[key] = name, at.tp_rank, own.cpu().clone(memory_format=torch.contiguous_format)
    return given


def _write_config(model: PreTrainedModel, config: Any, folder: Path) -> None:
    config = copy.deepcopy(config)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = model.__dict__.get("name_or_path") or None
    mapping = None
    if config.task_type is None:
        cls = transformers_class(type(model))
        mapping = {"base_model_class": cls.__name__, "parent_library": cls.__module__}
    config.save_pretrained(folder, auto_mapping_dict=mapping)
