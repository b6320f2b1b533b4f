"""A tiny model of the same architecture: the config with its sizes made small.

Works on the names that configs have in common, nothing here knows an architecture. What is no size (activations, norms,
kinds of attention, scaling) stays as it is; per-layer lists keep every kind of layer that they have; special tokens are
moved into the vocabulary. What a name cannot tell is written down in the policies' file ``_small.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from transformers import PreTrainedConfig

from oslo_engine.errors import PlanError
from oslo_engine.tiny.changes import ASKED, BY_LAYER, Changes, is_size
from oslo_engine.tiny.sizes import Sizes
from oslo_engine.tiny.written import written_sizes

_NOT_ARGUMENTS = ("model_type", "transformers_version", "architectures", "_name_or_path", "id2label", "label2id")


def shrink(
    config: PreTrainedConfig, sizes: Sizes, *, num_blocks: int = 2, dropout: float = 0.0, by_name: bool = False
) -> PreTrainedConfig:
    """The config to verify with, of the same class.

    Args:
        config: any size; unchanged.
        sizes: what was asked for.
        num_blocks: how many there are at least, of all stacks together, unless ``sizes`` says how many layers.
        dropout: every dropout probability becomes this.
        by_name: only a model type was named, and the config is its class's default: use fewer KV heads than heads, and
            every kind of layer that is written down.

    Raises:
        PlanError: the config has no such size, or its class does not take the small ones.
    """
    parts = _parts(config)
    if dropout > 0 and not any(_dropouts(part.to_dict(), dropout, layers=False) for part in parts):
        raise PlanError(
            "the config has no dropout", where=type(config).__name__, expected="a field with 'drop' in its name", got="none"
        )
    written = {} if sizes.full else written_sizes(config.model_type)
    small = _shrunk(config, sizes, num_blocks, dropout, by_name, written)
    if small.is_encoder_decoder and getattr(small, "decoder_start_token_id", None) is None:
        small.decoder_start_token_id = small.pad_token_id if getattr(small, "pad_token_id", None) is not None else 0
    for asked, found in ASKED.items():
        value = getattr(sizes, asked)
        if value is not None and not any(getattr(part, name, None) == value for part in _parts(small) for name in found):
            raise PlanError(
                f"the config has no size for {asked} that could be {value}",
                where=type(config).__name__,
                expected=" or ".join(found),
                got=str({name: _given(config)[name] for name in found if is_size(_given(config).get(name))} or "none of them"),
            )
    return small


def _shrunk(
    config: PreTrainedConfig, sizes: Sizes, num_blocks: int, dropout: float, by_name: bool, written: Mapping[str, Any]
) -> PreTrainedConfig:
    """``written``: fields of this config, and ``part.field`` of its parts."""
    given = _given(config)
    own = {name: value for name, value in written.items() if "." not in name}
    changes = Changes(config, given, sizes, num_blocks, by_name, own)
    changed: dict[str, Any] = changes.requested() if sizes.full else changes.tiny()
    changed |= _dropouts(given, dropout)
    if sizes.tied is not None:
        changed["tie_word_embeddings"] = sizes.tied
    for name, part in _sub_configs(config).items():
        below = {key.removeprefix(f"{name}."): value for key, value in written.items() if key.startswith(f"{name}.")}
        below = {**written_sizes(part.model_type), **below} if not sizes.full else {}
        changed[name] = _shrunk(part, sizes, num_blocks, dropout, by_name, below).to_dict()
    return _rebuilt(config, given, changed)


def _rebuilt(config: PreTrainedConfig, given: Mapping[str, Any], changed: Mapping[str, Any]) -> PreTrainedConfig:
    """Of the class's own arguments, so that it derives the rest from them; what it did not derive is set afterwards."""
    wanted = {**given, **changed}
    declared = set(_declared(type(config)).values())
    arguments = {name: value for name, value in wanted.items() if not declared or name in {*declared, BY_LAYER}}
    try:
        small = type(config)(**arguments)
        for name, value in wanted.items():
            if name not in arguments and (not hasattr(small, name) or isinstance(changed.get(name), list)):
                setattr(small, name, value)
    except Exception as error:  # whatever the class's own checks raise
        raise PlanError(
            "the config's class does not take a small size",
            where=type(config).__name__,
            got=f"{type(error).__name__}: {error}",
            hint="pass a config of a small model and full_size=True (--full-size)",
        ) from error
    for name, value in given.items():  # constructors derive settings from one another
        if name not in changed and isinstance(value, (bool, str, float)) and getattr(small, name, value) != value:
            setattr(small, name, value)
    return small


def _sub_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    found = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}}
    return {name: part for name, part in found.items() if isinstance(part, PreTrainedConfig)}


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    return [config, *(each for part in _sub_configs(config).values() for each in _parts(part))]


def _given(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields by the names of the class's arguments."""
    declared = _declared(type(config))
    return {declared.get(name, name): value for name, value in config.to_dict().items() if name not in _NOT_ARGUMENTS}


def _declared(cls: type[PreTrainedConfig]) -> dict[str, str]:
    """Arguments of a config class by the names that its instances give them; empty if it says none."""
    if not is_dataclass(cls) or _has_own_constructor(cls):
        return {}
    return {cls.attribute_map.get(field.name, field.name): field.name for field in fields(cls)}


def _has_own_constructor(cls: type) -> bool:
    """Dataclasses have one that is made for them, with a signature of its own."""
    return not hasattr(vars(cls).get("__init__"), "__wrapped__")


def _dropouts(given: Mapping[str, Any], probability: float, *, layers: bool = True) -> dict[str, float]:
    """layers: include the probabilities to skip a layer, which are always 0."""
    return {
        name: type(value)(0) if skips or not probability else probability  # some classes insist on integers
        for name, value in given.items()
        if "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (skips := name.endswith(("layerdrop", "path_rate"))) or layers
    }
