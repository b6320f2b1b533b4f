"""Vocabulary-sharded logits: what may be done with them, and how to gather them.

The tensor class is in vocab_tensor.py; this file fills its tables of permitted operations.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from oslo_engine.comm.collectives import gather_from
from oslo_engine.layers import vocab_indexing, vocab_loss, vocab_ops, vocab_reductions
from oslo_engine.layers.vocab_layout import VocabLayout
from oslo_engine.layers.vocab_tensor import VocabShard

__all__ = ["VocabLayout", "VocabShard", "gather_logits"]

VocabShard.local_handlers = {
    **dict.fromkeys(vocab_ops.ELEMENTWISE, vocab_ops.elementwise),
    **dict.fromkeys(vocab_ops.IN_PLACE, vocab_ops.in_place),
    **dict.fromkeys(vocab_ops.REARRANGING, vocab_ops.rearrange),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), vocab_ops.join),
}
VocabShard.handlers = {
    **dict.fromkeys(("view", "reshape"), vocab_ops.reshape),
    **dict.fromkeys(("view_as", "reshape_as"), vocab_ops.reshape_as),
    "flatten": vocab_ops.flatten,
    "contiguous": vocab_ops.contiguous,
    "is_contiguous": vocab_ops.is_contiguous,
    "clone": vocab_ops.clone,
    **dict.fromkeys(("detach", ".data"), vocab_ops.detach),
    **dict.fromkeys(("to", "type_as"), vocab_ops.to),
    "cpu": partial(vocab_ops.to, device="cpu"),
    "float": partial(vocab_ops.cast, dtype=torch.float32),
    "double": partial(vocab_ops.cast, dtype=torch.float64),
    "half": partial(vocab_ops.cast, dtype=torch.float16),
    "bfloat16": partial(vocab_ops.cast, dtype=torch.bfloat16),
    "__iter__": vocab_ops.iterate,
    "__getitem__": vocab_indexing.getitem,
    "__setitem__": vocab_indexing.setitem,
    "gather": vocab_reductions.gather,
    "sum": vocab_reductions.total,
    "mean": vocab_reductions.mean,
    "max": vocab_reductions.maximum,
    "argmax": vocab_reductions.argmax,
    "logsumexp": vocab_reductions.logsumexp,
    "softmax": vocab_reductions.softmax,
    "log_softmax": vocab_reductions.log_softmax,
    "cross_entropy": vocab_loss.cross_entropy,
    "nll_loss": vocab_loss.nll_loss,
}


def gather_logits(outputs: Any) -> Any:
    """Make logits whole again.

    Args:
        outputs: a model output, a tuple or dict of tensors, or a tensor. Unchanged.

    Returns:
        A copy in which every vocabulary-sharded tensor is replaced by the whole one, ``[.., V]``, with a gradient, the same on
        every rank of the tp axis. Everything else, and a tensor that is whole already, as it was.

    Communication: forward one all-gather per sharded tensor, of this rank's slice; backward none. Every rank of the tp axis
    must call it.
    """
    return tree_map_only(VocabShard, _gather, outputs)


def _gather(shard: VocabShard) -> Tensor:
    vocab = shard.vocab
    return gather_from(shard.to_local(), vocab.axis, vocab.dim, vocab.sizes)
