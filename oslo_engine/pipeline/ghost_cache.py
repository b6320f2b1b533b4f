"""Key/value caches on stages that do not run all blocks.

``generate`` and the models read lengths from any layer of a cache (usually the first) and reorder, crop and repeat all of them.
The layers of other stages' blocks therefore get keys and values too: of the right length, one head and one feature wide, so
that all the bookkeeping of every cache class stays true at a cost of one number a token.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from oslo_engine.rewrite.cache_calls import CacheCall, Ghost


def feed_ghosts(calls: Sequence[CacheCall], hidden: Tensor, cache: Cache) -> None:
    """Do to the cache what a block would have done, with keys, values and states that hold nothing.

    Args:
        calls: what the block did when it was recorded.
        hidden: its input: its first tensor argument.
        cache: changed in place.
    """
    for call in calls:
        holder: Any = getattr(cache, call.part) if call.part else cache
        arguments = dict(call.arguments)
        layer: Any = arguments.get("layer_idx", call.layer)
        if call.part == "cross_attention_cache":
            # Filled once; its lengths are read by the blocks that fill it, which run elsewhere.
            filled: dict[int, bool] = cache.is_updated  # type: ignore[attr-defined]
            if filled.get(layer):
                continue
            filled[layer] = True
        if call.layer is not None:
            holder = holder.layers[call.layer]
        for name, value in arguments.items():
            if isinstance(value, Ghost):
                arguments[name] = torch.zeros(value.shape(hidden), dtype=hidden.dtype, device=hidden.device)
        getattr(holder, call.method)(**arguments)


_MIRRORED = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "reset")


def caches_of_stages(cache: Cache, stages: Sequence[int]) -> dict[int, Cache]:
    """The cache that each stage of this rank works on: the given one for the first, a copy of its own for any other.

    Two stages of one rank run the same forward one after the other, and each must find all layers as they were before it.
    Changes that ``generate`` makes to the given cache between steps (beams, cropping) reach the copies too.
    """
    if len(stages) > 1 and "_oslo_copies" not in cache.__dict__:
        cache.__dict__["_oslo_copies"] = {stage: copy.deepcopy(cache) for stage in stages[1:]}
        for name in _MIRRORED:
            if hasattr(cache, name):
                setattr(cache, name, functools.partial(_everywhere, cache, name))
    return {stages[0]: cache, **cache.__dict__.get("_oslo_copies", {})}


def _everywhere(cache: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    for copied in cache._oslo_copies.values():
        getattr(copied, name)(*args, **kwargs)
    return getattr(type(cache), name)(cache, *args, **kwargs)
