"""Embedding and head that hold only this rank's rows of the vocabulary.

The modules stay what they were: the object is the same, and its class becomes a subclass of its own class, so that an embedding
that scales its output, or a head that scales its logits, goes on doing so.

``num_embeddings`` and ``out_features`` keep meaning the whole vocabulary: that is what users compare with ``len(tokenizer)``,
what Transformers copies from the embedding to a tied head, what peft sizes adapters by, and what repr should show. Only
``weight`` (and ``bias``) is this rank's slice. ``padding_idx`` is read as a row of ``weight`` (by ``forward`` and by
Transformers' initialisation), so it is the slice's: None on the ranks that do not own the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oslo_engine.comm.collectives import Axis, copy_to, gather_from, reduce_from
from oslo_engine.errors import PlanError
from oslo_engine.layers.partial import sum_gradient
from oslo_engine.layers.specialize import specialize
from oslo_engine.layers.vocab_layout import VocabLayout, check_ids
from oslo_engine.layers.vocab_shard import VocabShard


def vocab_parallel_embedding(module: nn.Module, axis: Axis, sizes: Sequence[int]) -> nn.Module:
    """Make an embedding look up ids of the whole vocabulary in the rows of all ranks.

    Args:
        module: ``nn.Embedding`` or a subclass that treats each token by itself; ``weight`` is [sizes[axis.rank], hidden].
        axis: the tp axis.
        sizes: rows per rank, ``torch.tensor_split`` sizes of the vocabulary.

    Returns:
        ``module``, changed. On an axis of size 1 it is left alone.

    Raises:
        PlanError: the weight does not have this rank's rows, or the module renormalises rows or scales gradients by frequency.

    Communication: forward one all-reduce of [batch, sequence, hidden]; backward none.
    """
    if axis.size == 1:
        return module
    vocab = _layout(module, axis, sizes)
    for setting in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, setting, None):
            raise PlanError(f"an embedding with `{setting}` cannot be cut by vocabulary", where=type(module).__name__)
    padding = getattr(module, "padding_idx", None)
    if padding is not None:
        padding = padding - vocab.start if vocab.start <= padding < vocab.stop else None
    _sum_uncut(module, axis)
    return specialize(module, VocabParallelEmbedding, vocab=vocab, num_embeddings=vocab.total, padding_idx=padding)


def vocab_parallel_head(module: nn.Module, axis: Axis, sizes: Sequence[int]) -> nn.Module:
    """Make a language-model head compute this rank's slice of the logits.

    Args:
        module: ``nn.Linear`` or a subclass with logits in its last dimension; ``weight`` is [sizes[axis.rank], hidden],
            ``bias`` (if any) [sizes[axis.rank]].
        axis: the tp axis.
        sizes: rows per rank, as for the embedding.

    Returns:
        ``module``, changed. On an axis of size 1 it is left alone.

    Raises:
        PlanError: weight or bias does not have this rank's rows.

    Communication: with gradients enabled forward none, backward one all-reduce of the hidden states; without, one all-gather of
    the logits.
    """
    if axis.size == 1:
        return module
    vocab = _layout(module, axis, sizes)
    _sum_uncut(module, axis)
    return specialize(module, VocabParallelHead, vocab=vocab, out_features=vocab.total)


class VocabParallelEmbedding:
    """Forward of an embedding cut by rows; stands before the module's own class."""

    vocab: VocabLayout

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check_ids(input, self.vocab.total, what="token id")
        rows, inside = self.vocab.locate(input)
        own = super().forward(rows, *args, **kwargs)  # type: ignore[misc]
        return reduce_from(own.masked_fill(~inside.unsqueeze(-1), 0), self.vocab.axis)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows {self.vocab}"  # type: ignore[misc]


class VocabParallelHead:
    """Forward of a head cut by rows; stands before the module's own class."""

    vocab: VocabLayout

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        local = super().forward(copy_to(input, self.vocab.axis), *args, **kwargs)  # type: ignore[misc]
        if torch.is_grad_enabled():
            return VocabShard.wrap(local, self.vocab)
        return gather_from(local, self.vocab.axis, -1, self.vocab.sizes)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows {self.vocab}"  # type: ignore[misc]


def _layout(module: nn.Module, axis: Axis, sizes: Sequence[int]) -> VocabLayout:
    where = type(module).__name__
    if isinstance(module, (VocabParallelEmbedding, VocabParallelHead)):
        raise PlanError("the module is vocabulary-parallel already", where=where)
    if len(sizes) != axis.size or min(sizes) < 1:
        raise PlanError(
            "every tp rank needs a slice of the vocabulary",
            where=where,
            expected=f"{axis.size} sizes >= 1",
            got=str(tuple(sizes)),
        )
    for name in ("weight", "bias"):
        parameter = getattr(module, name, None)
        if parameter is not None and parameter.shape[0] != sizes[axis.rank]:
            raise PlanError(
                f"the {name} must hold this rank's rows of the vocabulary",
                where=where,
                expected=f"{sizes[axis.rank]} rows (tp rank {axis.rank} of {axis.size})",
                got=f"{parameter.shape[0]} rows",
            )
    return VocabLayout(axis, tuple(sizes))


def _sum_uncut(module: nn.Module, axis: Axis) -> None:
    """A norm inside an embedding sees on each rank only that rank's tokens: its gradient is a part of the whole."""
    for prefix, owner in module.named_modules():
        for name in owner._parameters:
            if prefix or name not in ("weight", "bias"):
                sum_gradient(owner, name, axis)
