"""``logits[...]`` and ``logits[...] = value`` on vocabulary-sharded logits. Communication: none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_engine.comm.collectives import copy_to
from oslo_engine.layers.vocab_tensor import NeedsWholeVocabulary, VocabShard


def getitem(shard: VocabShard, index: Any) -> VocabShard:
    """Index the other dimensions in any way; of the vocabulary only a contiguous slice can be taken."""
    before, entry, after = _written_out(shard, index)
    if any(isinstance(item, (Tensor, list)) for item in after):
        raise NeedsWholeVocabulary("an index tensor behind the vocabulary dimension")
    dim = -1 - sum(not _is_int(item) for item in after)
    start, stop = _bounds(shard, entry)
    local = shard.raw_local()[(*before, _own_slice(shard, start, stop), *after)]
    vocab = shard.vocab.cut(start, stop).at_dim(dim)
    if any(isinstance(item, (Tensor, list)) for item in before):  # torch copies here
        return VocabShard.wrap(local, vocab, shard.dtype)
    return shard.view_from(local, vocab)


def setitem(shard: VocabShard, index: Any, value: Any) -> None:
    """Write one number: to chosen entries of the vocabulary, or to chosen positions of the other dimensions."""
    before, entry, after = _written_out(shard, index)
    if isinstance(value, Tensor) and (isinstance(value, VocabShard) or value.ndim):
        raise NeedsWholeVocabulary("only a single number can be written")
    if isinstance(value, Tensor):
        value = copy_to(value, shard.vocab.axis)
    own: Any
    if isinstance(entry, slice):
        own = _own_slice(shard, *_bounds(shard, entry))
    elif any(isinstance(item, (Tensor, list)) for item in (*before, *after)):
        raise NeedsWholeVocabulary("index tensors in several dimensions")
    else:
        rows, inside = shard.vocab.locate(torch.arange(shard.vocab.total, device=shard.device)[entry].flatten())
        own = rows[inside]
    local = shard.to_local().clone()
    local[(*before, own, *after)] = value
    shard.assign(VocabShard.wrap(local, shard.vocab))


def _written_out(shard: VocabShard, index: Any) -> tuple[list[Any], Any, list[Any]]:
    """Spell out Ellipsis and missing dimensions.

    Returns:
        The entries before the vocabulary's, the vocabulary's, and those behind it.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    missing = shard.ndim - sum(_num_dims(entry) for entry in entries)
    at = next((position for position, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    entries[at : at + 1] = [slice(None)] * missing
    dim = 0
    for position, entry in enumerate(entries):
        if dim <= shard.ndim + shard.vocab.dim < dim + _num_dims(entry):
            return entries[:position], entry, entries[position + 1 :]
        dim += _num_dims(entry)
    raise IndexError(f"too many indices for logits of {shard.ndim} dimensions")


def _num_dims(entry: Any) -> int:
    """How many dimensions of the indexed tensor an entry uses up."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.ndim if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1


def _is_int(entry: Any) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool)


def _bounds(shard: VocabShard, entry: Any) -> tuple[int, int]:
    if not isinstance(entry, slice) or entry.step not in (None, 1):
        raise NeedsWholeVocabulary("single entries of the vocabulary")
    start, stop, _ = entry.indices(shard.vocab.total)
    return start, max(start, stop)


def _own_slice(shard: VocabShard, start: int, stop: int) -> slice:
    """The part of ``vocabulary[start:stop]`` that this rank holds, in local rows."""
    first, length = shard.vocab.start, shard.vocab.length
    return slice(min(max(start - first, 0), length), min(max(stop - first, 0), length))
