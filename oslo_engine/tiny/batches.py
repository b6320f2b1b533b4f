"""Batches that are hard to split: padded on the left, labels spread unevenly, a smaller last micro-batch, ever other shapes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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


def make_batch(
    config: Any, shape: Shape, *, micro_batch_size: int, seed: int, model: nn.Module | None = None
) -> dict[str, Tensor]:
    """Arguments of a training forward.

    The first row is padded the most. The first micro-batch has few labels, the second of three or more none, the others many.
    Models that know no mask read what is padded like any token, split or not: their batch is the same without the mask.

    Args:
        model: what the batch is for. It gets what its forward takes and nothing else.

    Returns:
        input_ids, attention_mask, labels: [rows, length]; labels [rows, target] where there is a decoder. For a model also
        decoder_input_ids, since not all can make them of a row without labels; input_features or input_values, [rows, ...],
        for input_ids and attention_mask of one that hears; labels [rows, length, codebooks] of one with a head for each.
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
    batch = {"input_ids": ids, "attention_mask": mask, "labels": targets.masked_fill(~kept, IGNORED)}
    return batch if model is None else _fitting(batch, model, targets, generator)


def _fitting(batch: dict[str, Tensor], model: nn.Module, targets: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    taken = inspect.signature(model.forward).parameters
    config: Any = model.config
    if "input_ids" not in taken:
        batch |= _features(config, targets.shape[0], taken, generator)
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = targets.roll(1, 1).index_fill(1, torch.tensor([0]), pad_token(config))
    if hasattr(config, "num_latents"):  # computes on latents, and answers for every position that it knows
        missing = config.max_position_embeddings - batch["labels"].shape[1]
        batch["labels"] = nn.functional.pad(batch["labels"], (0, missing), value=IGNORED)
    find_heads: Any = getattr(model, "get_output_embeddings", None)
    heads = find_heads() if find_heads is not None else None
    if isinstance(heads, nn.ModuleList):
        batch["input_ids"] = batch["input_ids"].repeat_interleave(len(heads), 0)
        batch["labels"] = batch["labels"].unsqueeze(-1).expand(-1, -1, len(heads))
    return {name: value for name, value in batch.items() if name in taken}


def make_inputs(config: Any, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids and the mask of what is padded on the left: a third of the first row, less of every third one after it."""
    ids = _tokens(config, (rows, length), generator)
    mask = torch.ones_like(ids)
    for row in range(0, rows, 3):
        mask[row, : max(length // 3 - row // 3, 1)] = 0
    return ids.masked_fill(mask == 0, pad_token(config)), mask


def pad_token(config: Any) -> int:
    pad = getattr(config, "pad_token_id", None)
    return pad if isinstance(pad, int) and 0 <= pad < vocab_size(config) else 0


def vocab_size(config: Any) -> int:
    """Of the text that goes in; composite configs have it in their text part."""
    for name in ("vocab_size", "src_vocab_size"):
        if isinstance(size := getattr(config, name, None), int):
            return size
    return int(config.get_text_config().vocab_size)


def _features(config: Any, rows: int, taken: Container[str], generator: torch.Generator) -> dict[str, Tensor]:
    """Of sound: as many frames as the encoder has places for where it takes no others."""
    if "input_values" in taken:
        return {"input_values": torch.randn(rows, 40 * math.prod(config.conv_stride), generator=generator)}
    if "input_features" not in taken:
        return {}
    if (bins := getattr(config, "num_mel_bins", None)) is not None:
        return {"input_features": torch.randn(rows, bins, 2 * config.max_source_positions, generator=generator)}
    width = config.input_feat_per_channel * config.input_channels
    return {"input_features": torch.randn(rows, config.max_source_positions, width, generator=generator)}


def _share(micro: int, num_micros: int) -> float:
    if micro == 1 and num_micros > 2:
        return 0.0
    return _FEW_LABELS if micro == 0 else _MANY_LABELS


def _tokens(config: Any, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Random tokens of the whole vocabulary but the one that pads (some models derive positions from it)."""
    ids = torch.randint(0, vocab_size(config) - 1, shape, generator=generator)
    return ids + (ids >= pad_token(config))
