"""Assisted generation: tokens are proposed by a small model or looked up in the text, and checked by the split model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oslo_engine.generation.agreement import Agreement


def agree_on_proposals(generator: Any, agreement: Agreement) -> Any:
    """Let every rank check what the deciding rank's generator proposes.

    The generators of the other ranks run along: an assistant may itself be split, and keeps a cache.

    Args:
        generator: a candidate generator of Transformers; its ``get_candidates`` is replaced.

    Communication: at every proposal two broadcasts: of its sizes and its ids; in sampling also of its scores.
    """
    own: Callable[..., tuple[Tensor, Tensor | None]] = generator.get_candidates

    def get_candidates(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        ids, scores = own(*args, **kwargs)
        sizes = agreement.tell(
            torch.tensor([*ids.shape, *(scores.shape if scores is not None else (0, 0, 0))], device=agreement.device)
        )
        rows, length, *of_scores = sizes.tolist()
        ids = agreement.tell(_here(ids, (rows, length), torch.int64, agreement))
        if of_scores[0]:
            dtype = torch.float32 if scores is None else scores.dtype
            scores = agreement.tell(_here(scores, tuple(of_scores), dtype, agreement))
        return ids, scores

    generator.get_candidates = get_candidates
    return generator


def _here(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, agreement: Agreement) -> Tensor:
    if agreement.decides:
        assert tensor is not None
        return tensor.to(agreement.device, dtype).contiguous()
    return torch.empty(shape, dtype=dtype, device=agreement.device)
