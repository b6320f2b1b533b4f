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
import torch.utils._pytree as pytree
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import Cache, EncoderDecoderCache

_NO_CACHE: Any = getattr(cache_utils, "DummyLayer", ())  # of blocks that keep none, in newer Transformers


def find_cache(values: Any) -> Cache | None:
    """The cache among the arguments of a call, if any."""
    leaves = pytree.tree_leaves(values, is_leaf=lambda leaf: isinstance(leaf, Cache))
    return next((leaf for leaf in leaves if isinstance(leaf, Cache)), None)


def feed_ghost(block: nn.Module, hidden: Tensor, cache: Cache) -> None:
    """Do to the cache what the block would have done, with keys and values that hold nothing.

    Args:
        block: the block that does not run here.
        hidden: its input, [batch, new tokens, hidden].
        cache: changed in place.
    """
    numbers = (getattr(module, "layer_idx", None) for module in block.modules())
    layer: int | None = next((number for number in numbers if isinstance(number, int)), None)
    if layer is None:
        return
    ghost = torch.zeros(hidden.shape[0], 1, hidden.shape[1], 1, dtype=hidden.dtype, device=hidden.device)
    if isinstance(cache, EncoderDecoderCache):
        if not cache.is_updated.get(layer):
            # Lengths of the cross attention's cache are read by the blocks that fill it, which run elsewhere.
            cache.cross_attention_cache.update(ghost, ghost, layer)
            cache.is_updated[layer] = True
        cache = cache.self_attention_cache
    kept = cache.layers[layer] if layer < len(cache.layers) else None
    if hasattr(kept, "update_conv_state"):
        _feed_states(kept, hidden)
    if (kept is None or hasattr(kept, "update")) and not isinstance(kept, _NO_CACHE):
        cache.update(ghost, ghost, layer)


def _feed_states(layer: Any, hidden: Tensor) -> None:
    """A convolution's state and a recurrent one (linear attention, state spaces), of one channel; they have no length."""
    ghost = torch.zeros(hidden.shape[0], 1, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    for state in range(layer.number_of_states):
        layer.update_conv_state(ghost, state_idx=state, conv_kernel_size=1)
        layer.update_recurrent_state(ghost[..., 0], state_idx=state)


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
