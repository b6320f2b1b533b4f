"""An architecture that is not in Transformers: a small decoder with some habits that a policy must know about.

* q, k and v lie in one weight, head by head;
* a slope for each head weakens attention with distance (as in ALiBi) and is learned;
* gate and up of the MLP are one weight, and the MLP adds the residual itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class HeronConfig(PreTrainedConfig):
    model_type = "heron"

    vocab_size: int = 1000
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    intermediate_size: int = 344
    tie_word_embeddings: bool = True


class Attention(nn.Module):
    def __init__(self, config: HeronConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1, config.num_attention_heads))
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, self.num_heads, 3, self.head_dim).transpose(1, 2).unbind(-2)
        position = torch.arange(length, device=x.device)
        distance = (position[:, None] - position[None, :]).abs()
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5 - self.slopes[:, None, None] * distance
        weights = scores.masked_fill(~mask[:, None], torch.finfo(x.dtype).min).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: HeronConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: HeronConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.mlp(x + self.attention(self.norm(x), mask))


class HeronForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = HeronConfig
    base_model_prefix = ""
    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012  (as Transformers has it)

    def __init__(self, config: HeronConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, :].bool()
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}  # no cache: everything is computed again
