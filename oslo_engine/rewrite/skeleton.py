"""Throwaway models without weights, and small inputs to record them with."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from oslo_engine.errors import PlanError, UnsupportedError
from oslo_engine.rewrite.meta_weights import CPU, META, without_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Mode = Literal["train", "forward", "prefill", "decode"]

# Sizes differ from one another, so that a tensor's dimensions cannot be mistaken and a label of a wrong shape raises.
NUM_ROWS = 2
LENGTH = 8
TARGET_LENGTH = 6
NUM_PADDED = 2
NUM_CHARACTERS = 256  # the vocabulary of models that read characters and have none

# The names under which Transformers passes what a decoding step continues from.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")
RECORDABLE_ATTENTION = ("eager", "sdpa", None)

_ACCEPTED: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()  # of a model, by root, the kind of labels it takes


def skeleton(
    source: type[PreTrainedModel] | PreTrainedModel, config: PreTrainedConfig | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build a model on meta: its modules, ties and attributes, without allocating a weight.

    Args:
        source: a model class, or a model, which is copied with all that was changed in it (resized modules, adapters).
        config: of the model to build from a class; unchanged. A model brings its own.
        dtype: of the floating-point parameters and buffers.

    Returns:
        The model; tied parameters are one object, gradient checkpointing is off, attention is eager or sdpa.

    Raises:
        PlanError: a class without a config, or a model with another config than its own.
    """
    if isinstance(source, type):
        if config is None:
            raise PlanError("a config is needed to build a model from its class", where=source.__name__)
        config = copy.deepcopy(config)
        _make_attention_recordable(config)
        with META:
            model = source._from_config(config, dtype=dtype)
    else:
        if config is not None and config is not source.config:
            raise PlanError("a model is copied with its own config", where=type(source).__name__, expected="no other config")
        model = _copy_on_meta(source, dtype)
        _make_attention_recordable(model.config)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    return model


def _copy_on_meta(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A deep copy in which every parameter and buffer is on meta; what was one tensor stays one."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device=META, dtype=dtype if tensor.is_floating_point() else None)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _make_attention_recordable(config: PreTrainedConfig) -> None:
    """Fused attention kernels need their device; eager attention has the same data flow."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    if any(getattr(part, "_attn_implementation", None) not in RECORDABLE_ATTENTION for part in parts):
        config._attn_implementation = "eager"


def example_inputs(model: PreTrainedModel, mode: Mode, *, root: str = "") -> dict[str, Any]:
    """Small real inputs for one mode: two rows of text, the first one padded on the left.

    Args:
        model: on meta, see ``skeleton``.
        mode: "train": labels where the model takes them, no cache; "forward": neither; "prefill": what ``generate`` begins
            with, the model makes the cache (and gets its encoder's output, if it has one); "decode": one token per row and a
            filled cache.
        root: name of the submodule that is to be called, for instance the encoder.

    Returns:
        Keyword arguments for the forward of the model or of the submodule.

    Raises:
        PlanError: an unknown mode.
        UnsupportedError: the forward takes no text, or in the modes of generation keeps no cache.
    """
    if mode not in get_args(Mode):
        raise PlanError("unknown mode to record", where="mode", expected=", ".join(get_args(Mode)), got=repr(mode))
    with CPU:  # whatever the caller's default device
        return _example_inputs(model, mode, root)


def _example_inputs(model: PreTrainedModel, mode: Mode, root: str) -> dict[str, Any]:
    names = _argument_names(model.get_submodule(root).forward)
    if "input_ids" in names:
        inputs = _text_inputs(model, names)
    elif (found := _speech_inputs(model, names, root)) is not None:
        inputs = found
    else:
        raise UnsupportedError(
            "example inputs can only be made for models that read text, or speech to write text",
            where=f"{type(model).__name__}.{root or 'forward'}",
            expected="an argument input_ids, or input_features and decoder_input_ids",
            got=", ".join(names),
            hint="pass inputs of your own to record",
        )
    if "use_cache" in names:
        inputs["use_cache"] = mode in ("prefill", "decode")
    if mode == "train" and "labels" in names:
        kinds = _kinds_of_labels(model, inputs)
        inputs |= kinds[_accepted_kind(model, inputs, kinds, root)]
    if mode in ("prefill", "decode"):
        inputs = _generation_inputs(model, inputs, names, root, decode=mode == "decode")
    return inputs


def _argument_names(forward: Callable[..., Any]) -> list[str]:
    """What a forward takes; ``use_cache`` is often among its keyword arguments without a name of its own."""
    parameters = inspect.signature(forward).parameters
    names = list(parameters)
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [*names, "use_cache"] if takes_more and _cache_argument(names) and "use_cache" not in names else names


def cache_argument(model: PreTrainedModel) -> str | None:
    """The forward's name for what it can continue from; None where it cannot."""
    return _cache_argument(_argument_names(model.forward))


def _cache_argument(names: Sequence[str]) -> str | None:
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


def _text_inputs(model: PreTrainedModel, names: list[str]) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": _token_ids(model, LENGTH)}
    if "attention_mask" in names:
        inputs["attention_mask"] = torch.ones(NUM_ROWS, LENGTH, dtype=torch.long)
        inputs["attention_mask"][0, :NUM_PADDED] = 0
        pad = _token(model, "pad_token_id")
        if pad is not None:
            inputs["input_ids"][0, :NUM_PADDED] = pad
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = _token_ids(model, TARGET_LENGTH)
    return inputs


def _speech_inputs(model: PreTrainedModel, names: list[str], root: str) -> dict[str, Any] | None:
    """Features of a sound and the text so far, for an encoder that takes features in one length only; None for other models.

    The features are of the model's type. How many of them a moment has and how many moments a sound stands in the config; in
    which order, and by how much the encoder shortens the sound, only in its code, so these are tried.
    """
    if not {"input_features", "decoder_input_ids"} <= set(names):
        return None
    text = {"decoder_input_ids": _token_ids(model, TARGET_LENGTH)}
    sizes = _numbers(model.config, "mel_bins", "feat_per_channel"), _numbers(model.config, "max_source_positions")
    for bins, positions, shortening in itertools.product(*map(sorted, map(set, sizes)), (2, 1, 4)):
        for shape in ((NUM_ROWS, bins, positions * shortening), (NUM_ROWS, positions * shortening, bins)):
            inputs = {"input_features": torch.zeros(shape, dtype=model.dtype), **text}
            try:
                _run(model, inputs, root)
            except Exception:  # whatever a model's own code raises on a shape it does not expect
                continue
            return inputs
    return None


def _token_ids(model: PreTrainedModel, length: int) -> Tensor:
    """Ordinary tokens from the middle of the vocabulary, each row ending in EOS (some classifiers look for it)."""
    config = model.config.get_text_config()
    size = _vocabulary_size(config)
    special = set(_numbers(config, "_token_id", "_token_index", "_index"))
    pool = [token for token in range(size // 2, min(size, size // 2 + 64)) if token not in special] or [size - 1]
    rows = [[pool[(row * length + column) % len(pool)] for column in range(length)] for row in range(NUM_ROWS)]
    eos = _token(model, "eos_token_id")
    return torch.tensor([[*row[:-1], row[-1] if eos is None else eos] for row in rows])


def _numbers(config: PreTrainedConfig, *endings: str) -> list[int]:
    names = [name for name in {*vars(config), *config.attribute_map, *endings} if name.endswith(endings)]
    return [value for name in names if type(value := getattr(config, name, None)) is int and value >= 0]


def _vocabulary_size(config: PreTrainedConfig) -> int:
    return min(_numbers(config, "vocab_size"), default=NUM_CHARACTERS)


def _token(model: PreTrainedModel, name: str) -> int | None:
    config = model.config.get_text_config()
    token = getattr(config, name, None)
    token = token[0] if isinstance(token, list) and token else token
    return token if type(token) is int and 0 <= token < _vocabulary_size(config) else None


def _run(model: PreTrainedModel, inputs: Mapping[str, Any], root: str = "") -> Any:
    with without_weights(model):
        return model.get_submodule(root)(**inputs)


def assume_labels(model: PreTrainedModel) -> None:
    """Take for granted that the model takes the labels that nearly every head wants, tokens; otherwise they are tried."""
    _ACCEPTED.setdefault(model, {}).setdefault("", 0)


def doubt_labels(model: PreTrainedModel) -> None:
    _ACCEPTED.pop(model, None)


def _kinds_of_labels(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens, a class per token, a class per row, a value per row and class, none."""
    tokens = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"]
    classes = torch.zeros_like(tokens)
    values = torch.zeros(NUM_ROWS, model.config.num_labels or 1, dtype=model.dtype)
    return [*({"labels": labels} for labels in (tokens, classes, classes[:, 0], values)), {}]


def _accepted_kind(model: PreTrainedModel, inputs: Mapping[str, Any], kinds: Sequence[Mapping[str, Any]], root: str) -> int:
    """Which labels the forward takes. That stands nowhere but in its code, so they are tried, once for each model."""
    known = _ACCEPTED.setdefault(model, {})
    if root not in known:
        known[root] = next(
            (at for at, labels in enumerate(kinds[:-1]) if _runs(model, {**inputs, **labels}, root)), len(kinds) - 1
        )
    return known[root]


def _runs(model: PreTrainedModel, inputs: Mapping[str, Any], root: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _run(model, inputs, root)
        except Exception:  # whatever a model's own code raises on a shape it does not expect
            return False
    return True


def _generation_inputs(
    model: PreTrainedModel, inputs: dict[str, Any], names: list[str], root: str, *, decode: bool
) -> dict[str, Any]:
    cache_name = _cache_argument(names)
    if cache_name is None or "use_cache" not in names:
        raise _no_cache(model, root, f"arguments {', '.join(names)}")
    if "decoder_input_ids" in names and "encoder_outputs" in names:
        # generate() calls the encoder once, outside the forward
        encoded = {name: inputs[name] for name in ("input_ids", "input_features", "attention_mask") if name in inputs}
        encoder = model.get_encoder()
        with without_weights(model):
            inputs["encoder_outputs"] = encoder(**encoded, return_dict=True)
        inputs = {name: value for name, value in inputs.items() if name not in ("input_ids", "input_features")}
    if not decode:
        return inputs
    output = _run(model, inputs, root)
    if output.get(cache_name) is None:
        raise _no_cache(model, root, f"outputs {', '.join(output)}")
    ids = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    inputs |= {cache_name: output[cache_name], ids: inputs[ids][:, -1:]}
    if ids == "input_ids" and "attention_mask" in inputs:
        inputs["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones(NUM_ROWS, 1, dtype=torch.long)], dim=1)
    return inputs


def _no_cache(model: PreTrainedModel, root: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        "this forward keeps no cache, so it cannot be recorded for generation",
        where=f"{type(model).__name__}.{root or 'forward'}",
        expected=f"use_cache and one of {', '.join(CACHE_ARGUMENTS)}",
        got=got,
    )
