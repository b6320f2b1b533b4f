"""Batches that are hard to split: padded on the left, labels spread unevenly, a smaller last micro-batch, ever other shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
_FEW_LABELS, _MANY_LABELS = 0.3, 0.9


@dataclass(frozen=True)
class Shape:
    """rows, length of the input, length of the target (encoder-decoders)."""

    rows: int
    length: int
    target: int


def training_shapes(*, pp: int, micro_batch_size: int, multiple: int = 1) -> tuple[Shape, Shape, Shape]:
    """Three batches: pp + 1 micro-batches, pp + 2, and as few as the pipeline takes.

    Args:
        multiple: lengths are multiples of it.
    """
    missing = 1 if micro_batch_size > 1 else 0
    few = max(pp, 2)
    rows = [count * micro_batch_size - missing for count in (few + 1, few + 2, few)]
    lengths = [(11, 7), (7, 10), (14, 5)]
    if multiple > 1:
        lengths = [(-(-length // multiple) * multiple, -(-target // multiple) * multiple) for length, target in lengths]
    first, second, third = (Shape(count, *pair) for count, pair in zip(rows, lengths, strict=True))
    return first, second, third


def make_batch(config: Any, shape: Shape, *, micro_batch_size: int, seed: int) -> dict[str, Tensor]:
    """Arguments of a training forward.

    The first row is padded the most. The first micro-batch has few labels, the second of three or more none, the others many.

    Returns:
        input_ids, attention_mask, labels: [rows, length]; labels [rows, target] where there is a decoder.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, mask = make_inputs(config, shape.rows, shape.length, generator)
    has_decoder = config.is_encoder_decoder
    targets = _tokens(config, (shape.rows, shape.target), generator) if has_decoder else ids
    keep = torch.rand(targets.shape, generator=generator)
    shares = [_share(row // micro_batch_size, -(-shape.rows // micro_batch_size)) for row in range(shape.rows)]
    kept = keep < torch.tensor(shares)[:, None]
    if not has_decoder:
        kept &= mask.bool()
    kept[0, -1] = kept[-1, -1] = True
    return {"input_ids": ids, "attention_mask": mask, "labels": targets.masked_fill(~kept, IGNORED)}


def make_inputs(config: Any, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids and the mask of what is padded on the left: a third of the first row, less of every third one after it."""
    ids = _tokens(config, (rows, length), generator)
    mask = torch.ones_like(ids)
    for row in range(0, rows, 3):
        mask[row, : max(length // 3 - row // 3, 1)] = 0
    return ids.masked_fill(mask == 0, pad_token(config)), mask


def pad_token(config: Any) -> int:
    pad = getattr(config, "pad_token_id", None)
    return pad if isinstance(pad, int) and 0 <= pad < config.vocab_size else 0


def _share(micro: int, num_micros: int) -> float:
    if micro == 1 and num_micros > 2:
        return 0.0
    return _FEW_LABELS if micro == 0 else _MANY_LABELS


def _tokens(config: Any, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Random tokens of the whole vocabulary but the one that pads (some models derive positions from it)."""
    ids = torch.randint(0, config.vocab_size - 1, shape, generator=generator)
    return ids + (ids >= pad_token(config))
