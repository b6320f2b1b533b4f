"""Making batches: documents without padding for flash attention, and T5's span corruption.

For masked language modelling, take Transformers' ``DataCollatorForLanguageModeling``: it works on items of
``DatasetForCausalLM`` as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oslo_engine.errors import DataError

_IGNORED = -100


class FlatteningCollator:
    """Windows with ``cu_seqlens`` as one long row, with the arguments by which attention keeps documents apart.

    A batch has ``input_ids``, ``labels`` and ``position_ids``, i64[1, tokens], and ``cu_seq_lens_q``, ``cu_seq_lens_k``,
    i32[documents + 1], ``max_length_q``, ``max_length_k``, as Transformers hands them to flash attention. Other attention
    implementations of Transformers read the borders off ``position_ids``.
    """

    def __call__(self, items: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
        if not items or any("cu_seqlens" not in item for item in items):
            raise DataError("there are no borders to keep", expected="items with cu_seqlens", hint="borders=('cu_seqlens',)")
        lengths = torch.cat([item["cu_seqlens"].diff() for item in items])
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        tokens = torch.cat([item["input_ids"] for item in items])
        labels = torch.cat([item["labels"] for item in items])
        labels[ends[:-1].long()] = _IGNORED
        positions = torch.arange(len(tokens)) - torch.repeat_interleave(ends[:-1].long(), lengths.long())
        longest = int(lengths.max())
        return {
            "input_ids": tokens[None],
            "labels": labels[None],
            "position_ids": positions[None],
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }


class SpanCorruptionCollator:
    """T5's objective: spans of the text are replaced by a sentinel each; the labels are the sentinels with their spans.

        input   Thank you <s0> me to your party <s1> week </s>
        labels  <s0> for inviting <s1> last </s>

    A batch has ``input_ids`` and ``attention_mask``, i64[items, longest input], and ``labels``, i64[items, longest], filled up
    with -100. Draws from torch's generator, which a DataLoader seeds in its workers.

    Args:
        sentinel_ids: of <extra_id_0>, <extra_id_1>, ... in this order.
        eos_token_id: ends inputs and labels.
        pad_token_id: fills inputs up.
        noise_density: share of the tokens that is replaced.
        mean_span_length: of the spans that are replaced, in tokens.

    Raises:
        DataError: an argument is wrong, or a text has more spans than there are sentinels.
    """

    def __init__(
        self,
        sentinel_ids: Sequence[int],
        eos_token_id: int,
        pad_token_id: int,
        noise_density: float = 0.15,
        mean_span_length: float = 3.0,
    ) -> None:
        if not sentinel_ids:
            raise DataError("span corruption needs sentinels", hint="ids of <extra_id_0>, <extra_id_1>, ...")
        if not 0 < noise_density < 1 or mean_span_length < 1:
            raise DataError(
                "no such corruption",
                expected="0 < noise_density < 1, mean_span_length >= 1",
                got=f"{noise_density}, {mean_span_length}",
            )
        self.sentinels = torch.tensor(list(sentinel_ids))
        self.eos_token_id, self.pad_token_id = eos_token_id, pad_token_id
        self.noise_density, self.mean_span_length = noise_density, mean_span_length

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pairs = [self._corrupted(self._tokens(item)) for item in items]
        inputs = torch.nn.utils.rnn.pad_sequence([pair[0] for pair in pairs], True, self.pad_token_id)
        lengths = torch.tensor([len(pair[0]) for pair in pairs])
        return {
            "input_ids": inputs,
            "attention_mask": (torch.arange(inputs.shape[1]) < lengths[:, None]).long(),
            "labels": torch.nn.utils.rnn.pad_sequence([pair[1] for pair in pairs], True, _IGNORED),
        }

    def _tokens(self, item: dict[str, Any]) -> torch.Tensor:
        tokens = torch.as_tensor(item["input_ids"], dtype=torch.int64)
        if "attention_mask" in item:
            tokens = tokens[torch.as_tensor(item["attention_mask"], dtype=torch.bool)]
        if len(tokens) < 2:
            raise DataError("a text is too short to be corrupted", expected="2 tokens", got=len(tokens))
        return tokens

    def _corrupted(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The text with sentinels, and the sentinels with the text they stand for."""
        size = len(tokens)
        num_noise = min(max(round(size * self.noise_density), 1), size - 1)
        num_spans = min(max(round(num_noise / self.mean_span_length), 1), num_noise, size - num_noise)
        if num_spans > len(self.sentinels):
            raise DataError("a text has more spans than there are sentinels", expected=len(self.sentinels), got=num_spans)
        kept, noise = _parts(size - num_noise, num_spans), _parts(num_noise, num_spans)
        spans = tokens.split(torch.stack([kept, noise], 1).flatten().tolist())
        inputs, labels = [], []
        for number in range(num_spans):
            sentinel = self.sentinels[number : number + 1]
            inputs += [spans[2 * number], sentinel]
            labels += [sentinel, spans[2 * number + 1]]
        eos = tokens.new_tensor([self.eos_token_id])
        return torch.cat([*inputs, eos]), torch.cat([*labels, eos])


def _parts(total: int, count: int) -> torch.Tensor:
    """``count`` positive numbers that add up to ``total``, each such choice as likely as another."""
    cuts = torch.randperm(total - 1)[: count - 1].sort().values + 1
    return torch.cat([cuts, cuts.new_tensor([total])]).diff(prepend=cuts.new_zeros(1))
