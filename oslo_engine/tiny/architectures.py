"""The language models that the installed Transformers has: (task, model type), and the class of each."""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

Task = Literal["causal", "masked", "seq2seq"]
TASKS: tuple[str, ...] = get_args(Task)


def architectures() -> list[tuple[str, str]]:
    """Every pair of a task and a model type; a type may stand under several tasks."""
    return [(task, model_type) for task in TASKS for model_type in _mapping(task)]


def class_names(task: str, model_type: str) -> tuple[str, ...]:
    """Classes of Transformers that do this task with this config; the first is the usual one. Empty if there is none."""
    return _mapping(task).get(model_type, ())


def tasks_of(model_type: str) -> tuple[str, ...]:
    return tuple(task for task in TASKS if model_type in _mapping(task))


@cache
def _mapping(task: str) -> dict[str, tuple[str, ...]]:
    from transformers.models.auto import modeling_auto as auto

    names = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }[task]
    return {kind: tuple(name) if isinstance(name, (tuple, list)) else (name,) for kind, name in dict(names).items()}
