"""Triton program of no_repeat_ngram; the rule is in ``oslo_engine.kernels.no_repeat_ngram``.

Programs look at places in a sequence, not at the vocabulary. Several may ban the same token: they store the same value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oslo_engine.kernels.gpu.launch import launch


@triton.jit
def no_repeat_ngram_forward(ids_ptr, scores_ptr, length, V, sib, sil, fill, NGRAM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    ids = ids_ptr + row * sib
    repeats = start + NGRAM <= length
    for nth in range(NGRAM - 1):
        recent = tl.load(ids + tl.full([], length - NGRAM + 1 + nth, tl.int64) * sil)
        repeats = repeats & (tl.load(ids + (start + nth) * sil, mask=repeats, other=0) == recent)
    token = tl.load(ids + (start + NGRAM - 1) * sil, mask=repeats, other=-1).to(tl.int64)
    banned = repeats & (token >= 0) & (token < V)
    values = tl.full([BLOCK], 0.0, tl.float32) + fill
    tl.store(scores_ptr + row * V + token, values.to(scores_ptr.dtype.element_ty), mask=banned)


def forward(scores: Tensor, ids: Tensor, ngram_size: int, fill: float) -> Tensor:
    """The scores with ``fill`` where a token is banned."""
    result = scores.clone(memory_format=torch.contiguous_format)
    places = max(0, ids.shape[1] - ngram_size + 1)
    block = min(1024, triton.next_power_of_2(max(places, 1)))
    launch(
        no_repeat_ngram_forward,
        (ids.shape[0], triton.cdiv(places, block)),
        scores,
        *(ids, result, ids.shape[1], scores.shape[1], *ids.stride(), fill),
        NGRAM=ngram_size,
        BLOCK=block,
    )
    return result
