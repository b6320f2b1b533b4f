"""Key/value caches on stages that do not run all blocks.

``generate`` and the models read lengths from any layer of a cache (usually the first) and reorder, crop and repeat all of them. The
layers of other stages' blocks therefore get keys and values too: of the right length, one head and one feature wide, so that all the
bookkeeping of every cache class stays true at a cost of one number a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache


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
    layer = next((m.layer_idx for m in block.modules() if isinstance(getattr(m, "layer_idx", None), int)), None)
    if layer is None:
        return
    ghost = torch.zeros(hidden.shape[0], 1, hidden.shape[1], 1, dtype=hidden.dtype, device=hidden.device)
    if isinstance(cache, EncoderDecoderCache):
        if not cache.is_updated.get(layer):
            # Lengths of the cross attention's cache are read by the blocks that fill it, which run elsewhere.
            cache.cross_attention_cache.update(ghost, ghost, layer)
            cache.is_updated[layer] = True
        cache = cache.self_attention_cache
    cache.update(ghost, ghost, layer)
