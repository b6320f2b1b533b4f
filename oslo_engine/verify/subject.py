"""From what the user names to a model class and a config: a model type, a folder, a hub name, a config or a model."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from oslo_engine.errors import OsloError, UnsupportedError
from oslo_engine.verify.settings import Sizes
from oslo_engine.verify.shrink import shrink


@dataclass(frozen=True)
class Subject:
    """What is verified.

    module, name: where the model class is defined. The ranks import it; this process need not.
    by_name: whether only a model type was given, so that the config is its class's default.
    """

    module: str
    name: str
    config: PreTrainedConfig
    by_name: bool = False

    def shrunk(self, sizes: Sizes, *, num_blocks: int, dropout: float = 0.0) -> Subject:
        """The same with the config that ``shrink`` makes; of a mere model type with fewer KV heads than heads."""
        config = shrink(self.config, sizes, num_blocks=num_blocks, dropout=dropout, grouped=self.by_name)
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


def find_subject(model: Any) -> Subject:
    """Resolve the ``model`` argument of ``verify``. The weights of a model are not looked at.

    Raises:
        UnsupportedError: no such model, or no language model with a head.
    """
    if isinstance(model, PreTrainedConfig):
        return Subject("transformers", _class_name(model), copy.deepcopy(model))
    if isinstance(model, (str, Path)):
        return _by_name(str(model))
    if hasattr(model, "config") and hasattr(model, "get_output_embeddings"):
        return _of_model(model)
    raise UnsupportedError(
        "this is nothing that can be verified",
        expected="a model type, a folder or hub name, a config or a model of Transformers",
        got=type(model).__name__,
    )


def _by_name(name: str) -> Subject:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    folder = Path(name)
    if not folder.is_dir() and name in CONFIG_MAPPING_NAMES:
        config = CONFIG_MAPPING[name]()
        return Subject("transformers", _class_name(config), config, by_name=True)
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # OSError, ValueError and what the hub client raises
        near = difflib.get_close_matches(name, CONFIG_MAPPING_NAMES, n=3)
        raise UnsupportedError(
            "there is no such model",
            expected="a model type of Transformers, a folder with a config.json, or a name on the hub",
            got=name,
            hint=f"did you mean {' or '.join(near)}?" if near else str(error).split("\n")[0],
        ) from None
    return Subject("transformers", _class_name(config), config)


def _of_model(model: Any) -> Subject:
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
    return Subject(*_address(made_of), copy.deepcopy(model.config))


def _address(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _can_be_imported(cls: type) -> bool:
    return cls.__module__ != "__main__" and getattr(import_module(cls.__module__), cls.__qualname__, None) is cls


def _class_name(config: PreTrainedConfig) -> str:
    """The class that the config names, if it is a language model; else the one its model type is mapped to.

    Encoder-decoders: sequence to sequence. Others: the masked head where there is one and the config is no decoder's, else the
    causal one.
    """
    from transformers.models.auto import modeling_auto as auto

    seq2seq, masked, causal = (
        {kind: names if isinstance(names, (tuple, list)) else (names,) for kind, names in dict(mapping).items()}
        for mapping in (
            auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        )
    )
    kind = config.model_type
    known = {name for mapping in (seq2seq, masked, causal) for name in mapping.get(kind, ())}
    for name in config.architectures or ():
        if name in known:
            return str(name)
    decodes = getattr(config, "is_decoder", False)
    order = [seq2seq] if config.is_encoder_decoder else [causal, masked] if decodes else [masked, causal]
    names = next((mapping[kind] for mapping in order if kind in mapping), None)
    if names is None:
        raise _no_language_model(kind or type(config).__name__)
    return str(names[0])


def _no_language_model(what: str) -> UnsupportedError:
    return UnsupportedError(
        "only language models with a head can be verified",
        expected="a causal, masked or sequence-to-sequence language model",
        got=what,
    )
