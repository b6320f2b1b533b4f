"""From what the user names to a model class and a config: a model type, a folder, a hub name, a class, a config or a model."""

from __future__ import annotations

import copy
import difflib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from oslo_engine.errors import OsloError, UnsupportedError
from oslo_engine.tiny.architectures import TASKS, class_names, tasks_of
from oslo_engine.tiny.shrink import shrink
from oslo_engine.tiny.sizes import Sizes

_MAKES_CAUSAL = ("is_decoder", "causal")  # settings of configs that serve encoders and decoders


@dataclass(frozen=True)
class Subject:
    """What is verified.

    module, name: where the model class is defined. The ranks import it; this process need not.
    by_name: whether only a model type or a class was given, so that the config is its class's default.
    """

    module: str
    name: str
    config: PreTrainedConfig
    by_name: bool = False

    def shrunk(self, sizes: Sizes, *, num_blocks: int, dropout: float = 0.0) -> Subject:
        """The same with the config that ``shrink`` makes; of a mere model type with fewer KV heads than heads."""
        config = shrink(self.config, sizes, num_blocks=num_blocks, dropout=dropout, by_name=self.by_name)
        return replace(self, config=config)

    def load_class(self) -> Any:
        return getattr(import_module(self.module), self.name)

    def build(self, construct: Callable[..., Any], **options: Any) -> Any:
        """``construct(class, config)``.

        Raises:
            UnsupportedError: the class does not take its own config.
        """
        try:
            return construct(self.load_class(), self.config, **options)
        except OsloError:
            raise
        except Exception as error:
            raise UnsupportedError(
                "the class cannot build a model from this config", where=self.name, got=f"{type(error).__name__}: {error}"
            ) from error


def find_subject(model: Any, task: str | None = None) -> Subject:
    """Resolve the ``model`` argument of ``verify``. The weights of a model are not looked at.

    Args:
        model: a model type, a folder or hub name, ``module:Class`` (found from the current folder too), a config or a model.
        task: causal, masked or seq2seq; None: the class that the config names, if it is a language model, else for
            encoder-decoders seq2seq, for others masked where there is such a class and the config is no decoder's.

    Raises:
        UnsupportedError: no such model, no language model with a head, or none for this task.
    """
    if task is not None and task not in TASKS:
        raise UnsupportedError("there is no such task", where="task", expected=" or ".join(TASKS), got=repr(task))
    if isinstance(model, PreTrainedConfig):
        return _of_config(copy.deepcopy(model), task)
    if isinstance(model, (str, Path)):
        return _by_name(str(model), task)
    if hasattr(model, "config") and hasattr(model, "get_output_embeddings"):
        return _of_model(model, task)
    raise UnsupportedError(
        "this is nothing that can be planned or verified",
        expected="a model type, a folder or hub name, a config or a model of Transformers",
        got=type(model).__name__,
    )


def _by_name(name: str, task: str | None) -> Subject:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    folder = Path(name)
    if not folder.exists() and re.fullmatch(r"[\w.]+:\w+", name):
        module, _, cls = name.partition(":")
        return _by_class(module, cls, task)
    if not folder.is_dir() and name in CONFIG_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name]()
        except Exception as error:  # whatever checks a class has for its own values
            raise UnsupportedError(
                "this model type does not take its own defaults", where=name, got=str(error), hint="pass a config"
            ) from error
        return _of_config(config, task, by_name=True)
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # OSError, ValueError and what the hub client raises
        near = difflib.get_close_matches(name, CONFIG_MAPPING_NAMES, n=3)
        raise UnsupportedError(
            "there is no such model",
            expected="a model type of Transformers, a folder with a config.json, module:Class, or a name on the hub",
            got=name,
            hint=f"did you mean {' or '.join(near)}?" if near else str(error).split("\n")[0],
        ) from None
    return _of_config(config, task)


def _by_class(module: str, name: str, task: str | None) -> Subject:
    """A class that is not Transformers' own, with the defaults of its config."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # a command's path lacks the folder it is called in
        sys.path.insert(0, str(Path.cwd()))
    try:
        cls = getattr(import_module(module), name)
        config = cls.config_class()
    except Exception as error:  # whatever the module or the config raises
        raise UnsupportedError(
            "this class gives no config to build a model from",
            where=f"{module}:{name}",
            expected="a model class of an importable module, whose config_class has defaults",
            got=f"{type(error).__name__}: {error}",
            hint="run the command in the folder of the module, or put that on PYTHONPATH",
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise UnsupportedError("this is no model class", where=f"{module}:{name}", expected="a PreTrainedModel", got=repr(cls))
    _check_task(cls.__name__, config, task)
    return Subject(module, name, config, by_name=True)


def _check_task(cls: str, config: PreTrainedConfig, task: str | None) -> None:
    if task is not None and cls not in class_names(task, config.model_type):
        raise UnsupportedError(
            "the task of a model is that of its class",
            where=f"task={task!r}",
            expected="no task, or a model type or config instead of the class or model",
            got=cls,
        )


def _of_config(config: PreTrainedConfig, task: str | None, *, by_name: bool = False) -> Subject:
    does, name = _choose(config, task)
    if getattr(config, "sub_configs", None):
        config = _part_for(getattr(import_module("transformers"), name), config)
    if does == "causal" or (does == task == "masked" and not config.is_encoder_decoder):
        for decides in _MAKES_CAUSAL:
            if hasattr(config, decides):
                setattr(config, decides, does == "causal")
    return Subject("transformers", name, config, by_name=by_name)


def _part_for(cls: Any, config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a composite config that the class is made of, which may be all of it."""
    wanted = cls.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return next((part for part in parts if isinstance(part, wanted)), config)


def _of_model(model: Any, task: str | None) -> Subject:
    cls = type(model)
    # A class with the parallel methods has the name of the one it was made of.
    made_of = next((base for base in cls.__mro__ if _address(base) == _address(cls) and _can_be_imported(base)), None)
    if made_of is None:
        raise UnsupportedError(
            "the ranks cannot import this model's class",
            where=cls.__qualname__,
            expected="a class at the top level of a module",
            got=f"defined in {cls.__module__}",
        )
    if model.get_output_embeddings() is None:
        raise _no_language_model(cls.__name__)
    _check_task(cls.__name__, model.config, task)
    return Subject(*_address(made_of), copy.deepcopy(model.config))


def _address(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _can_be_imported(cls: type) -> bool:
    return cls.__module__ != "__main__" and getattr(import_module(cls.__module__), cls.__qualname__, None) is cls


def _choose(config: PreTrainedConfig, task: str | None) -> tuple[str, str]:
    """Task and class name: the class that the config names, if it does the task; else the usual one of its model type."""
    kind = config.model_type
    found = {each: class_names(each, kind) for each in ([task] if task else TASKS)}
    for name in config.architectures or ():
        if (does := next((each for each, names in found.items() if name in names), None)) is not None:
            return does, str(name)
    decodes = getattr(config, "is_decoder", False)
    order = ["seq2seq"] if config.is_encoder_decoder else ["causal", "masked"] if decodes else ["masked", "causal"]
    does = next((each for each in ([task] if task else [*order, "seq2seq"]) if found[each]), None)
    if does is None and task is not None and (others := tasks_of(kind)):
        raise UnsupportedError(
            f"this architecture has no {task} language model", where=kind, expected=" or ".join(others), got=task
        )
    if does is None:
        raise _no_language_model(kind or type(config).__name__)
    return does, found[does][0]


def _no_language_model(what: str) -> UnsupportedError:
    return UnsupportedError(
        "only language models with a head can be planned and verified",
        expected="a causal, masked or sequence-to-sequence language model",
        got=what,
    )
