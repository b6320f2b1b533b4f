"""The choice of the next tokens, made by one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from oslo_engine.errors import PipelineError
from oslo_engine.generation.agreement import Agreement


def with_choice(processors: LogitsProcessorList, agreement: Agreement, config: GenerationConfig) -> AgreedProcessors:
    """Logits processors of one ``generate``, with the choice of the deciding rank behind them."""
    return AgreedProcessors(processors, Choice(agreement, config, plain=not processors))


class AgreedProcessors(LogitsProcessorList):
    """Logits processors, and behind them the choice of the deciding rank."""

    def __init__(self, processors: LogitsProcessorList, choice: Choice) -> None:
        super().__init__([*processors, choice])
        self._processors, self._choice = processors, choice

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        agreement = self._choice.agreement
        scores = agreement.run_own_processors(lambda: self._processors(input_ids, scores, **kwargs), scores)
        return self._choice(input_ids, scores)

    def without_choice(self) -> LogitsProcessorList:
        return self._processors


class Choice(LogitsProcessor):
    """Leave every rank no other token than the one that the deciding rank chose.

    Beams are chosen later, over all of a row, by ``agree_on_beams``.

    Args:
        config: of this ``generate``.

    Communication: one broadcast a step: of [rows, 1] ids; with ``output_scores`` (and in sampling from proposals, which reads
    whole distributions) of [rows, vocabulary] scores. Where slices are enough to choose, see ``Heads.choose``.
    """

    def __init__(self, agreement: Agreement, config: GenerationConfig, *, plain: bool) -> None:
        """Args:
        plain: whether nothing but the largest logit is looked for.
        """
        self.agreement = agreement
        self._sample, self._beams = bool(config.do_sample), config.num_beams or 1
        self._shows = bool(config.output_scores and config.return_dict_in_generate)
        greedy = not (self._sample or self._beams > 1 or self._shows or agreement.assisted)
        self._may_use_slices = plain and greedy and agreement.heads is not None and agreement.heads.single
        self._uses_slices = False
        if self._sample and agreement.assisted:
            _same_random_state(agreement)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        told = self.agreement.tell
        checks_proposals = self._sample and self.agreement.assisted
        if self._shows or checks_proposals:
            scores = told(scores.clone(memory_format=torch.contiguous_format))
        if self._beams > 1 or checks_proposals or (self._shows and not self._sample):
            return scores
        if self._shows:
            self.agreement.scores.append(scores)
        only = torch.full(scores.shape, float("-inf"), dtype=scores.dtype, device=scores.device)
        return only.scatter_(-1, self._from_slices(scores) if self._may_use_slices else told(self._chosen(scores)), 0.0)

    def _chosen(self, scores: Tensor) -> Tensor:
        """[rows, 1]; anything on a rank that does not decide."""
        if not self.agreement.decides:
            return torch.zeros(scores.shape[0], 1, dtype=torch.int64, device=scores.device)
        return self._draw(scores) if self._sample else scores.argmax(-1, keepdim=True)

    def _from_slices(self, scores: Tensor) -> Tensor:
        """The first choice is made from whole rows; its message also says whether slices are enough from then on."""
        heads = self.agreement.heads
        assert heads is not None
        if self._uses_slices:
            ids = heads.choose(scores)
            ids = self.agreement.tell(ids) if self.agreement.several_stages else ids
            if bool((ids < 0).any()):
                raise PipelineError(
                    "the model's logits were what its head computes in the first step of this generate, and are not now",
                    hint="pass logits_processor=[...] (one that returns the scores is enough): logits are then gathered whole",
                )
            return ids
        ids = self._chosen(scores)
        enough = torch.full_like(ids[:1], int(self.agreement.decides and heads.untouched(scores)))
        message = self.agreement.tell(torch.cat([ids, enough]))
        if int(message[-1]):
            self._uses_slices = True
            heads.put_logits("nowhere")
        else:
            self._may_use_slices = False
        return message[:-1]

    def _draw(self, scores: Tensor) -> Tensor:
        """As ``generate`` draws. It does so again afterwards, from what is left, and moves the random state on by as much as in
        an unsplit model: so the same seed gives the same tokens."""
        with torch.random.fork_rng(devices=[scores.device] if scores.is_cuda else []):
            return torch.multinomial(scores.softmax(-1), num_samples=1)


def _same_random_state(agreement: Agreement) -> None:
    state = agreement.tell(torch.get_rng_state().to(agreement.device))
    torch.set_rng_state(state.cpu())
    if agreement.device.type == "cuda":
        torch.cuda.set_rng_state(agreement.tell(torch.cuda.get_rng_state().to(agreement.device)).cpu())


def agree_on_beams(
    model: Any, agreement: Agreement, found: tuple[Tensor, Tensor, Tensor], given: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The deciding rank's continuations of the beams.

    Args:
        found: what ``_get_top_k_continuations`` returned on this rank: log-probabilities [rows, kept], sequences and beam
            indices [rows, kept, length].
        given: its arguments.

    Communication: three broadcasts of [rows, kept].
    """
    log_probs, sequences, beams = found
    at, step = given["cur_len"], given["cur_len"] - given["decoder_prompt_len"]
    log_probs = agreement.tell(log_probs.contiguous())
    tokens = agreement.tell(sequences[:, :, at].contiguous())
    beam_of = agreement.tell(beams[:, :, step].contiguous())
    if agreement.decides:
        return log_probs, sequences, beams
    first = torch.arange(given["batch_size"], device=beam_of.device).view(-1, 1) * given["num_beams"]
    within = (beam_of - first).long()
    sequences = model._gather_beams(given["running_sequences"], within)
    beams = model._gather_beams(given["running_beam_indices"], within)
    sequences[:, :, at], beams[:, :, step] = tokens, beam_of
    return log_probs, sequences, beams
