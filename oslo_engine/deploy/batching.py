"""Running generate calls of several callers together, so that each gets what it would have got alone.

Rows of different lengths are padded on the left. Every row has its own end: the call's ``max_new_tokens``, or the first
end-of-text token. What comes after a row's end is replaced by what the call alone would have returned there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oslo_engine.deploy.messages import Prompt, Traits

# Settings that choose a token by its scores alone: padding before a text changes nothing for them.
_BLIND = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "eos_token_id",
    "pad_token_id",
    "min_new_tokens",
    "use_cache",
    # A prompt that may run with others has these as they are for a single answer.
    "num_beams",
    "num_return_sequences",
    "return_dict_in_generate",
}
_PLAIN = (bool, int, float, str, type(None))
# Defaults of a model's generation settings that look at earlier tokens, with the values at which they do nothing.
_LOOK_BACK: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "min_length": (None, 0),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "watermarking_config": (None,),
    "prompt_lookup_num_tokens": (None,),
}


def looks_back(generation_config: Any) -> bool:
    return any(getattr(generation_config, name, None) not in idle for name, idle in _LOOK_BACK.items())


def as_prompt(
    args: tuple[Any, ...], kwargs: dict[str, Any], traits: Traits, *, streams: bool
) -> tuple[Prompt, dict[str, Any]] | None:
    """A generate call as rows and settings; None for one that has to be run as it is.

    Returns:
        The prompt, and the other arguments of the call.
    """
    settings = dict(kwargs)
    ids = settings.pop("input_ids", None)
    if args and ids is None and "inputs" not in settings:
        ids, args = args[0], args[1:]
    if ids is None:
        ids = settings.pop("inputs", None)
    mask = settings.pop("attention_mask", None)
    own = traits.generation_config
    single = all(_asked(name, settings, own) in (None, 1) for name in ("num_return_sequences", "num_beams"))
    plain = not any(isinstance(value, Tensor) for value in settings.values()) and "generation_config" not in settings
    rows = isinstance(ids, Tensor) and ids.ndim == 2 and ids.numel() and not ids.is_floating_point()
    masked = mask is None or (isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape)
    if args or not (single and plain and rows and masked) or _asked("return_dict_in_generate", settings, own):
        return None
    limit = settings.get("max_new_tokens")
    if type(limit) is int and limit > 0 and not getattr(traits.config, "is_encoder_decoder", False):
        del settings["max_new_tokens"]
    else:
        limit = None
    assert isinstance(ids, Tensor)
    return Prompt(ids, mask, limit, streams), settings


def batch_key(prompt: Prompt, settings: dict[str, Any], traits: Traits) -> Hashable | None:
    """Calls with the same key may run together; None: with no other."""
    if not all(is_plain(value) for value in settings.values()):
        return None
    if prompt.mask is None and int(pad_token(settings, traits.generation_config)) in prompt.ids:
        return None  # Transformers then guesses the mask from the whole batch
    named = tuple(sorted((name, _frozen(value)) for name, value in settings.items()))
    mixed = (
        traits.mixes_lengths
        and not looks_back(traits.generation_config)
        and prompt.max_new_tokens is not None
        and set(settings) <= _BLIND
    )
    return named, prompt.max_new_tokens is None, None if mixed else prompt.ids.shape[1]


def is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(isinstance(one, _PLAIN) for one in value))


def _frozen(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, (list, tuple)) else (type(value).__name__, value)


def pad_token(settings: dict[str, Any], generation_config: Any) -> int:
    """What finished rows are filled up with, as ``generate`` decides it."""
    pad = _asked("pad_token_id", settings, generation_config)
    ends = end_tokens(settings, generation_config)
    return int(pad) if pad is not None else ends[0] if ends else 0


def end_tokens(settings: dict[str, Any], generation_config: Any) -> list[int]:
    found = _asked("eos_token_id", settings, generation_config)
    if isinstance(found, Tensor):
        found = found.tolist()
    return [] if found is None else [int(one) for one in found] if isinstance(found, (list, tuple)) else [int(found)]


def _asked(name: str, settings: dict[str, Any], generation_config: Any) -> Any:
    asked = settings.get(name)
    return getattr(generation_config, name, None) if asked is None else asked


@dataclass(frozen=True)
class Joined:
    """Prompts as one batch.

    ids, mask: [rows, longest]; mask None where no prompt has one and all are of one length.
    limits: the new tokens after which each row ends, None where all rows end as the settings say.
    prompt_of_row: the index of the prompt that each row belongs to.
    """

    ids: Tensor
    mask: Tensor | None
    limits: list[int] | None
    prompt_of_row: list[int]


def join(prompts: Sequence[Prompt], pad: int) -> Joined:
    longest = max(prompt.ids.shape[1] for prompt in prompts)
    padded = any(prompt.ids.shape[1] != longest or prompt.mask is not None for prompt in prompts)
    ids = torch.cat([_pad_left(prompt.ids, longest, pad) for prompt in prompts])
    masks = [torch.ones_like(prompt.ids) if prompt.mask is None else prompt.mask.long() for prompt in prompts]
    mask = torch.cat([_pad_left(one, longest, 0) for one in masks]) if padded else None
    limits: list[int] | None = []
    for prompt in prompts:
        if prompt.max_new_tokens is None or limits is None:
            limits = None
        else:
            limits += [prompt.max_new_tokens] * prompt.ids.shape[0]
    rows = [index for index, prompt in enumerate(prompts) for _ in range(prompt.ids.shape[0])]
    return Joined(ids, mask, limits, rows)


def _pad_left(rows: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(rows, (length - rows.shape[1], 0), value=value)


def split(output: Tensor, prompts: Sequence[Prompt], joined: Joined, pad: int, ends: Sequence[int]) -> list[Tensor]:
    """What every prompt alone would have got.

    Args:
        output: [rows, longest + new], as generate returned it for ``joined``.

    Returns:
        For each prompt [its rows, its length + the new tokens of its longest row].
    """
    if joined.limits is None:  # all rows end alike, and all prompts are equally long
        return _cut_to_last_end(output, prompts, joined, pad, ends)
    new = output[:, joined.ids.shape[1] :]
    pieces, at = [], 0
    for prompt in prompts:
        rows = new[at : at + prompt.ids.shape[0]]
        at += prompt.ids.shape[0]
        assert prompt.max_new_tokens is not None
        lengths = [min(prompt.max_new_tokens, _length(row, ends)) for row in rows]
        pieces.append(torch.cat([prompt.ids, _filled(rows, lengths, pad)], dim=1))
    return pieces


def _cut_to_last_end(output: Tensor, prompts: Sequence[Prompt], joined: Joined, pad: int, ends: Sequence[int]) -> list[Tensor]:
    if len(prompts) == 1:
        return [output]
    start = joined.ids.shape[1] if torch.equal(output[:, : joined.ids.shape[1]], joined.ids) else 1  # a decoder's own start
    pieces, at = [], 0
    for prompt in prompts:
        rows = output[at : at + prompt.ids.shape[0]]
        at += prompt.ids.shape[0]
        lengths = [_length(row[start:], ends) for row in rows]
        pieces.append(torch.cat([rows[:, :start], _filled(rows[:, start:], lengths, pad)], dim=1))
    return pieces


def _length(row: Tensor, ends: Sequence[int]) -> int:
    """Up to and with the first end-of-text token."""
    hits = torch.isin(row, torch.tensor(list(ends), dtype=row.dtype)).nonzero() if ends else row.new_empty(0)
    return int(hits[0]) + 1 if len(hits) else len(row)


def _filled(rows: Tensor, lengths: Sequence[int], pad: int) -> Tensor:
    """Cut to the longest row, the others filled up."""
    filled = rows[:, : max(lengths)].clone()
    for row, length in zip(filled, lengths, strict=True):
        row[length:] = pad
    return filled
