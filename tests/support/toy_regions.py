"""A model whose one kind of block shows one thing that a policy can say about a region, with its policy in YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

HIDDEN, HEADS, HEAD_SIZE, VOCAB = 12, 4, 6, 20


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    block: str = "columns"
    num_heads: int = HEADS
    num_groups: int = 2
    num_experts: int = 4
    state_size: int = 3


class EnterAtColumns(nn.Module):
    """The norm in front and the residual stand in the module itself; a scale lies between the columns and the row."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.gate = nn.Linear(HIDDEN, 10), nn.Linear(HIDDEN, 10)
        self.scale = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(10, HIDDEN)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(y)) * self.up(y) * self.scale)


class WholeNorm(nn.Module):
    """Root mean square and layer norm over all heads together."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(HIDDEN, HEADS * HEAD_SIZE), nn.Linear(HIDDEN, HEADS * HEAD_SIZE)
        self.first, self.second = RootMeanSquare(HEADS * HEAD_SIZE), nn.LayerNorm(HEADS * HEAD_SIZE)
        self.down = nn.Linear(HEADS * HEAD_SIZE, HIDDEN)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.down(self.first(self.up(x)) * self.second(self.gate(x)))


class NormOfShared(nn.Module):
    """A norm over all KV heads, some of which several ranks hold."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.repeats = config.num_heads // config.num_groups
        self.q = nn.Linear(HIDDEN, config.num_heads * HEAD_SIZE)
        self.k = nn.Linear(HIDDEN, config.num_groups * HEAD_SIZE)
        self.norm = nn.LayerNorm(config.num_groups * HEAD_SIZE)
        self.down = nn.Linear(config.num_heads * HEAD_SIZE, HIDDEN)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        k = self.norm(self.k(x)).unflatten(-1, (-1, HEAD_SIZE)).repeat_interleave(self.repeats, -2)
        return self.down(torch.tanh(self.q(x)) * k.flatten(-2))


class RootMeanSquare(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class InnerRow(nn.Module):
    """From the cut features a small whole vector is computed, which all ranks go on with (a state-space block)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.into = nn.Linear(HIDDEN, 10)
        self.select, self.widen = nn.Linear(10, 3), nn.Linear(3, 10)
        self.decay = nn.Parameter(torch.ones(10, 2))
        self.out = nn.Linear(10, HIDDEN)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = torch.tanh(self.into(x))
        return self.out(y * self.widen(self.select(y)) * self.decay.sum(1))


class PackedGroups(nn.Module):
    """x and z by head, B by group of heads, dt by head, in one weight; all widths differ."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.groups, self.state_size = config.num_heads, config.num_groups, config.state_size
        self.sizes = [self.heads * HEAD_SIZE, self.groups * self.state_size, self.heads]
        self.head_size = HEAD_SIZE
        self.into = nn.Linear(HIDDEN, sum(self.sizes))
        self.mix = nn.Parameter(torch.ones(config.num_heads, config.state_size))
        self.norm = GroupNorm(self.sizes[0], self.sizes[0] // self.groups)
        self.out = nn.Linear(self.sizes[0], HIDDEN, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        z, b, dt = self.into(x).split(self.sizes, -1)
        b = b.unflatten(-1, (self.groups, self.state_size)).repeat_interleave(self.heads // self.groups, -2)
        z = z.unflatten(-1, (self.heads, self.head_size))
        y = (z * torch.tanh(dt)[..., None] * (b * self.mix).sum(-1, keepdim=True)).flatten(-2)
        return self.out(self.norm(y))


class GroupNorm(nn.Module):
    """Root mean square of each group's features apart."""

    def __init__(self, size: int, group_size: int) -> None:
        super().__init__()
        self.weight, self.group_size = nn.Parameter(torch.ones(size)), group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return self.weight * (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2)


class HeadsInBlocks(nn.Module):
    """q, k, v of the first half of the heads, then of the second (CodeGen)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads = 8
        self.qkv = nn.Linear(HIDDEN, 3 * self.heads * HEAD_SIZE)
        self.out = nn.Linear(self.heads * HEAD_SIZE, HIDDEN)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 3, self.heads // 2, HEAD_SIZE)).unbind(-3)
        weights = torch.softmax(torch.einsum("blghd,bmghd->bghlm", q, k), -1)
        return self.out(torch.einsum("bghlm,bmghd->blghd", weights, v).flatten(-3))


class BiasArgument(nn.Module):
    """Attention under an additive bias that comes from outside as [batch * heads, query, key] (ALiBi) and has a gradient."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(HIDDEN, 3 * config.num_heads * HEAD_SIZE)
        self.out = nn.Linear(config.num_heads * HEAD_SIZE, HIDDEN)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.config.num_heads, 3, HEAD_SIZE)).unbind(-2)
        scores = torch.einsum("blhd,bmhd->bhlm", q, k)
        weights = torch.softmax(scores + bias.view(scores.shape), -1)
        return self.out(torch.einsum("bhlm,bmhd->blhd", weights, v).flatten(-2))


class Mixture(nn.Module):
    """Experts in 3-D weights with biases, gate and up interleaved, and a router in front."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, config.num_experts)
        self.experts = Experts(config)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2, -1)
        return self.experts(tokens, index, weights).view(x.shape)


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.inner = config.num_experts, 7
        self.up = nn.Parameter(torch.empty(config.num_experts, HIDDEN, 2 * self.inner))
        self.up_bias = nn.Parameter(torch.empty(config.num_experts, 2 * self.inner))
        self.down = nn.Parameter(torch.empty(config.num_experts, self.inner, HIDDEN))
        self.down_bias = nn.Parameter(torch.empty(config.num_experts, HIDDEN))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            up = x[token] @ self.up[expert] + self.up_bias[expert]
            y = (F.silu(up[:, 0::2]) * up[:, 1::2]) @ self.down[expert] + self.down_bias[expert]
            out = out.index_add(0, token, y * weights[token, slot, None])
        return out


BLOCKS = {
    cls.__name__: cls
    for cls in (EnterAtColumns, WholeNorm, NormOfShared, InnerRow, PackedGroups, HeadsInBlocks, BiasArgument, Mixture)
}
REGIONS = {
    "EnterAtColumns": """
    enter: columns
    columns: {up: feature, gate: feature}
    rows: {down: feature}
    sum: [scale]""",
    "WholeNorm": """
    columns: {up: head, gate: head}
    rows: {down: head}
    norms: {first: head, second: head}""",
    "NormOfShared": """
    units: {group: num_groups, head: {count: num_heads, per: group}}
    columns: {q: head, k: group}
    rows: {down: head}
    norms: {norm: group}
    set: {repeats: head / group}""",
    "InnerRow": """
    columns: {into: feature, widen: feature}
    inner: {select: feature}
    cut: {decay: feature}
    rows: {out: feature}""",
    "PackedGroups": """
    columns: {into: [head * head_size, group * state_size, head]}
    cut: {mix: head}
    rows: {out: head}
    norms: {norm: {unit: head, within: group}}
    set:
      heads: head
      groups: group
      sizes: [head * head_size, group * state_size, head]
      norm.group_size: head * head_size / group
    units: {group: num_groups, head: {count: num_heads, per: group}}""",
    "HeadsInBlocks": """
    columns: {qkv: [head, head, head]}
    rows: {out: head}
    set: {heads: head}
    units: {head: {count: heads, blocks: 2}}""",
    "BiasArgument": """
    columns: {qkv: head}
    rows: {out: head}
    arguments: {bias: {unit: head, dim: 0, repeated: true}}
    set: {config.num_heads: head}""",
    "Mixture": """
    at: core.experts
    leave: scope
    inputs: [x, weights]
    cut:
      up: {unit: feature * 2, dim: 2}
      up_bias: {unit: feature * 2, dim: 1}
      down: {unit: feature, dim: 1}
    once: [down_bias]
    experts:
      count: num_experts
      parameters: [up, up_bias, down, down_bias]
      index: index
      weights: weights
      set: {num_experts: expert}""",
}


class ToyModel(PreTrainedModel):
    config_class = ToyConfig
    base_model_prefix = ""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.slopes = nn.Parameter(torch.ones(HEADS))
        self.layers = nn.ModuleList(Layer(config) for _ in range(2))
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        rows, length = input_ids.shape
        distance = torch.arange(length, dtype=x.dtype)
        bias = self.slopes[:, None, None] * (distance[None, :] - distance[:, None])
        bias = bias.expand(rows, HEADS, length, length).reshape(rows * HEADS, length, length)
        for layer in self.layers:
            x = layer(x, bias)
        return x


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.core = BLOCKS[config.block](config)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + self.core(x, bias)


def write_policy(block: str, folder: Path) -> Path:
    path = folder / f"{block}.yaml"
    at = "" if "at:" in REGIONS[block] else "\n    at: core"
    path.write_text(f"""\
models: [toy]
stacks: {{decoder: layers.*}}
units: {{head: num_heads}}
regions:
  only:{at}{REGIONS[block]}
replicate: {{embed: small, maybe router: small}}
""")
    return path
