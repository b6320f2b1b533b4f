"""Blocking repeated n-grams by a kernel, in the place of Transformers' own logits processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, NoRepeatNGramLogitsProcessor

from oslo_engine.errors import UnsupportedError

_wanted: ContextVar[bool] = ContextVar("fused_no_repeat_ngram_blocking", default=False)


class FusedNoRepeatNGram(LogitsProcessor):
    """What ``NoRepeatNGramLogitsProcessor`` does, for all rows and positions at once. ``ngram_size`` tokens."""

    def __init__(self, ngram_size: int) -> None:
        self.ngram_size = ngram_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        from oslo_engine.kernels.no_repeat_ngram import no_repeat_ngram

        return no_repeat_ngram(scores, input_ids, self.ngram_size)


@contextmanager
def fused_ngram_blocking(wanted: bool) -> Iterator[None]:
    """Whether ``generate`` inside uses the kernel. Per thread and task."""
    before = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(before)


def use_fused_ngram_blocking(processors: LogitsProcessorList) -> None:
    """Replace Transformers' processor in a list, where ``generate`` was asked to.

    Raises:
        UnsupportedError: no n-grams are blocked, so the request would have no effect.
    """
    if not _wanted.get():
        return
    found = [place for place, processor in enumerate(processors) if type(processor) is NoRepeatNGramLogitsProcessor]
    if not found:
        raise UnsupportedError(
            "fused_no_repeat_ngram_blocking has nothing to block",
            expected="no_repeat_ngram_size above 0 as well",
            hint="generate(..., no_repeat_ngram_size=3, fused_no_repeat_ngram_blocking=True)",
        )
    for place in found:
        processors[place] = FusedNoRepeatNGram(processors[place].ngram_size)
