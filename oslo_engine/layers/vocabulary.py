"""Embedding and head that hold only this rank's rows of the vocabulary.

The modules stay what they were: the object is the same, and its class becomes a subclass of its own class. Only the innermost
step, the lookup of ``nn.Embedding`` or the product of ``nn.Linear``, is replaced. What a model's own class does around it
(scales, norms, special tokens) sees ids of the whole vocabulary, whole embeddings and sharded logits, and needs no change:

    ScaledEmbedding.forward -> VocabParallelEmbedding.forward (instead of nn.Embedding.forward)

``num_embeddings``, ``padding_idx`` and ``out_features`` keep meaning the whole vocabulary: that is what users compare with
``len(tokenizer)``, models with ids, what Transformers copies from the embedding to a tied head, what peft sizes adapters by,
and what repr should show. Only ``weight`` (and ``bias``) is this rank's slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oslo_engine.comm.collectives import Axis, copy_to, gather_at_first, gather_from, reduce_from
from oslo_engine.errors import PlanError
from oslo_engine.layers.specialize import original_class
from oslo_engine.layers.vocab_layout import VocabLayout, check_ids
from oslo_engine.layers.vocab_shard import VocabShard

LogitsPlace = Literal["everywhere", "first rank", "nowhere"]

_CLASSES: dict[tuple[type, type], type] = {}


def vocab_parallel_embedding(module: nn.Module, axis: Axis, sizes: Sequence[int]) -> nn.Module:
    """Make an embedding look up ids of the whole vocabulary in the rows of all ranks.

    Args:
        module: ``nn.Embedding`` or a subclass that calls its forward; ``weight`` is [sizes[axis.rank], hidden].
        axis: the tp axis.
        sizes: rows per rank, ``torch.tensor_split`` sizes of the vocabulary.

    Returns:
        ``module``, changed. On an axis of size 1 it is left alone.

    Raises:
        PlanError: the weight does not have this rank's rows, the module renormalises rows or scales gradients by frequency, or
            its class looks up rows by itself.

    Communication: forward one all-reduce of [batch, sequence, hidden]; backward none.
    """
    if axis.size == 1:
        return module
    vocab = _layout(module, axis, sizes)
    for setting in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, setting, None):
            raise PlanError(f"an embedding with `{setting}` cannot be cut by vocabulary", where=type(module).__name__)
    return _become(module, VocabParallelEmbedding, vocab=vocab, num_embeddings=vocab.total)


def vocab_parallel_head(module: nn.Module, axis: Axis, sizes: Sequence[int]) -> nn.Module:
    """Make a language-model head compute this rank's slice of the logits.

    Args:
        module: ``nn.Linear`` or a subclass that calls its forward; ``weight`` is [sizes[axis.rank], hidden], ``bias`` (if any)
            [sizes[axis.rank]].
        axis: the tp axis.
        sizes: rows per rank, as for the embedding.

    Returns:
        ``module``, changed. On an axis of size 1 it is left alone.

    Raises:
        PlanError: weight or bias does not have this rank's rows, or the module's class multiplies by itself.

    Communication: with gradients enabled forward none, backward one all-reduce of the hidden states; without, one all-gather of
    the logits; while ``generate`` runs, of less (see ``oslo_engine.generation.heads``).
    """
    if axis.size == 1:
        return module
    vocab = _layout(module, axis, sizes)
    return _become(module, VocabParallelHead, vocab=vocab, out_features=vocab.total)


class VocabParallelEmbedding(nn.Embedding):
    """``nn.Embedding`` of which this rank holds some rows."""

    vocab: VocabLayout

    def forward(self, input: Tensor) -> Tensor:
        return self.look_up(input, self.weight)

    def look_up(self, input: Tensor, weight: Tensor) -> Tensor:
        """The rows of ids in a table that is divided as this one is. Args: weight [sizes[axis.rank], any width]."""
        vocab, padding = self.vocab, self.padding_idx
        check_ids(input, vocab.total, what="token id")
        rows, inside = vocab.locate(input)
        if padding is not None:
            padding = padding - vocab.start if vocab.start <= padding < vocab.stop else None
        own = F.embedding(rows, weight, padding, sparse=self.sparse)
        return reduce_from(own.masked_fill_(~inside.unsqueeze(-1), 0), vocab.axis)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows {self.vocab}"


class VocabParallelHead(nn.Linear):
    """``nn.Linear`` of which this rank holds some output features, the entries of a vocabulary.

    logits_place: which ranks get whole logits where no gradients are wanted. Elsewhere there are zeros, "nowhere" all but this
        rank's slice.
    last_rows: what of the last call was right here at the last position, [rows, vocabulary or slice]; None with "everywhere".
    """

    vocab: VocabLayout
    logits_place: LogitsPlace = "everywhere"
    last_rows: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        local = super().forward(copy_to(input, self.vocab.axis))
        if torch.is_grad_enabled():
            return VocabShard.wrap(local, self.vocab)
        if self.logits_place == "everywhere":
            return gather_from(local, self.vocab.axis, -1, self.vocab.sizes)
        if self.logits_place == "nowhere":
            self.last_rows = local[..., -1, :].clone()
            whole = local.new_zeros(*local.shape[:-1], self.vocab.total)
            self.vocab.narrow(whole).copy_(local)
            return whole
        found = gather_at_first(local, self.vocab.axis, -1, self.vocab.sizes)
        self.last_rows = None if found is None else found[..., -1, :].clone()
        return local.new_zeros(*local.shape[:-1], self.vocab.total) if found is None else found

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows {self.vocab}"


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


def _become(module: nn.Module, parallel: type[nn.Module], **fields: Any) -> nn.Module:
    """Put ``parallel`` between the module's class and the torch class that ``parallel`` extends; one new class per class."""
    cls, base = type(module), parallel.__base__
    assert base is not None
    if not isinstance(module, base) or not all(_calls_super(one, base) for one in cls.__mro__ if issubclass(one, base)):
        raise PlanError(
            "the vocabulary of this module cannot be cut: its class does by itself what it should leave to torch's",
            where=f"{cls.__module__}.{cls.__qualname__}",
            expected=f"a subclass of {base.__name__} whose forward calls super().forward",
            hint="leave it out of the policy's vocabulary: it is then held whole on every rank",
        )
    if (cls, parallel) not in _CLASSES:
        bases = (parallel,) if cls is base else (cls, parallel)
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _CLASSES[cls, parallel] = type(cls.__name__, bases, {**names, "_oslo_specializes": original_class(module)})
    module.__class__ = _CLASSES[cls, parallel]
    module.__dict__.update(fields)
    return module


def _calls_super(cls: type, base: type) -> bool:
    """Whether a class between the module's and torch's hands its forward on."""
    forward = vars(cls).get("forward")
    return cls is base or forward is None or "super" in forward.__code__.co_names
