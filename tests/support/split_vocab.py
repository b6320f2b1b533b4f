"""What the vocabulary tests share: the slices of this rank, and a comparison with the whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oslo_engine.comm.collectives import Axis
from oslo_engine.layers.vocab_shard import VocabLayout, VocabShard
from oslo_engine.layers.vocabulary import vocab_parallel_embedding, vocab_parallel_head


def tp_axis() -> Axis:
    """The whole world as one tp axis."""
    return Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def slice_sizes(vocabulary: int, num_ranks: int) -> tuple[int, ...]:
    """As torch.tensor_split cuts."""
    return tuple(len(part) for part in torch.tensor_split(torch.arange(vocabulary), num_ranks))


def layout_of(vocabulary: int, axis: Axis, dim: int = -1) -> VocabLayout:
    return VocabLayout(axis, slice_sizes(vocabulary, axis.size), dim)


def split_logits(whole: Tensor, axis: Axis) -> tuple[Tensor, VocabShard]:
    """This rank's slice of whole logits as a leaf that wants a gradient, and the shard made of it."""
    vocab = layout_of(whole.shape[-1], axis)
    leaf = vocab.narrow(whole.detach()).clone().requires_grad_()
    return leaf, VocabShard.wrap(leaf, vocab)


def split_vocabulary(model: nn.Module, axis: Axis) -> VocabLayout:
    """Cut the vocabulary of a Transformers model in place: input embedding, head, and whatever is tied to them."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocab = layout_of(head.weight.shape[0], axis)
    whole = {id(p): p for module in (embedding, head) for p in module.parameters(recurse=False)}
    rows = {key: nn.Parameter(p.detach()[vocab.start : vocab.stop].clone()) for key, p in whole.items()}
    for module in list(model.modules()):
        held = [(name, p) for name, p in module.named_parameters(recurse=False, remove_duplicate=False) if id(p) in rows]
        for name, parameter in held:
            setattr(module, name, rows[id(parameter)])
        if held and isinstance(module, nn.Embedding):
            vocab_parallel_embedding(module, axis, vocab.sizes)
    vocab_parallel_head(head, axis, vocab.sizes)
    return vocab


def assert_close(got: Tensor, expected: Tensor, relative: float, what: str = "") -> None:
    """Largest difference, as a part of the largest expected value."""
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    assert torch.equal(got.isnan(), expected.isnan()), what
    difference = (got.double() - expected.double()).nan_to_num().abs().max() if got.numel() else torch.zeros(())
    size = expected.double().nan_to_num().abs().max() if got.numel() else torch.zeros(())
    assert difference <= relative * size.clamp(min=1e-30), f"{what}: differs by {difference:.3g}, values up to {size:.3g}"
