"""One rank decides which token comes next.

``generate`` runs on every rank. Ranks that each took their own argmax would part ways at a near-tie, and ranks of earlier
pipeline stages hold no scores at all. So the last processor of the list replaces the scores: the deciding rank (tp rank 0 of
the last stage) broadcasts token ids, and every rank goes on with scores that leave no other choice. Scores themselves travel
only if the caller wants to see them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from oslo_engine.comm.collectives import Axis
from oslo_engine.errors import UnsupportedError


def refuse_what_ranks_cannot_agree_on(model: Any, kwargs: Mapping[str, Any], *, pipeline: bool) -> None:
    """Ways to generate in which tokens are chosen past the logits processors, or something is returned that few ranks have.

    Raises:
        UnsupportedError: one of them is asked for.
    """
    config = kwargs.get("generation_config") or model.generation_config

    def asked(name: str) -> Any:
        return kwargs.get(name, getattr(config, name, None))

    for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if asked(name) is not None:
            raise UnsupportedError("a split model does not run assisted generation", got=name, hint="leave it out")
    if pipeline and not model._supports_default_dynamic_cache() and asked("use_cache") is not False:
        raise UnsupportedError(
            "a pipeline cannot continue from the state that this class keeps between tokens",
            where=type(model).__name__,
            hint="pass use_cache=False: every step then computes the whole text anew",
        )
    if pipeline and asked("output_logits"):
        raise UnsupportedError(
            "raw logits do not travel through a pipeline",
            got="output_logits=True",
            hint="output_scores=True gives the processed scores",
        )


class AgreeOnTokens(LogitsProcessor):
    """Make every rank of a model choose the token that the deciding rank chose.

    Args:
        axis: the ranks that hold one copy of the model (tp and pp).
        source: which of them decides.
        config: greedy and sampling exchange one id a row; beam search the best candidates of each beam with their scores.

    Raises:
        UnsupportedError: beam search with sampling, whose choice is made outside the processors.

    Attributes:
        seen: with ``output_scores``, the scores of every step, which ``generate`` would have returned.

    Communication: one broadcast a step over tp and pp: [rows] ids, or [rows, candidates] ids and scores; with
    ``output_scores`` also [rows, vocabulary].
    """

    def __init__(self, axis: Axis, source: int, config: GenerationConfig) -> None:
        self.axis, self.source = axis, source
        self.beams = config.num_beams or 1
        self.sample = bool(config.do_sample)
        self.seen: list[Tensor] | None = [] if config.output_scores and config.return_dict_in_generate else None
        if self.beams > 1 and self.sample:
            raise UnsupportedError(
                "beam search with sampling does not run on a split model",
                got=f"num_beams={self.beams}, do_sample=True",
                hint="use one of the two",
            )
        eos = config.eos_token_id
        num_eos = len(eos) if isinstance(eos, (list, tuple)) else 1
        # What Transformers' beam search looks at: enough candidates that num_beams of them go on even if others end.
        self.candidates = 1 if self.beams == 1 else max(2, 1 + num_eos) * self.beams

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        decides = self.axis.rank == self.source
        if self.seen is not None:
            shown = scores.clone(memory_format=torch.contiguous_format)
            self._broadcast(shown)
            self.seen.append(shown)
        count = min(self.candidates, scores.shape[-1])
        if decides:
            values, ids = self._choose(scores, count)
        else:
            ids = torch.empty(scores.shape[0], count, dtype=torch.int64, device=scores.device)
            values = torch.empty(scores.shape[0], count, dtype=scores.dtype, device=scores.device)
        self._broadcast(ids)
        if self.beams > 1:
            self._broadcast(values)
        else:
            values = torch.zeros(ids.shape, dtype=scores.dtype, device=scores.device)
        return torch.full(scores.shape, float("-inf"), dtype=scores.dtype, device=scores.device).scatter_(-1, ids, values)

    def _choose(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if self.sample:
            ids = torch.multinomial(scores.softmax(-1), 1)
            return scores.gather(-1, ids), ids
        best: Any = scores.topk(count, dim=-1) if count > 1 else scores.max(-1, keepdim=True)
        return best.values.contiguous(), best.indices.contiguous()

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group=self.axis.group, group_src=self.source)
