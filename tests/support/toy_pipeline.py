"""A small model cut into stages by hand: what the pipeline runtime is tested with, and the same model unsplit to compare with.

Across every cut travel five values: the hidden states, a skip connection that only the last stage uses (others hand it on),
token positions (int64), a mask (bool), and a value that wants a gradient and that nobody uses. The first and the last stage
hold the same embedding matrix.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oslo_engine.comm.p2p import PipelineLinks
from oslo_engine.layers.deferred import DeferredLinear
from oslo_engine.pipeline.loop import open_loop, train_step
from oslo_engine.pipeline.micro_batch import MicroBatch, split_batch, weigh_by_labels
from oslo_engine.pipeline.orders import num_stages, rank_of_stage
from oslo_engine.pipeline.runtime import PipelineRuntime

VOCAB, HIDDEN = 13, 6
Values = tuple[Tensor, ...]


@dataclass
class Output:
    """Like a model's output."""

    loss: Tensor | None
    logits: Tensor


torch.utils._pytree.register_pytree_node(Output, lambda o: ([o.loss, o.logits], None), lambda values, _: Output(*values))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = DeferredLinear(HIDDEN, 2 * HIDDEN), DeferredLinear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        mixed = torch.tanh(self.up(hidden * (1 + 0.1 * positions.unsqueeze(-1))))
        return hidden + self.down(mixed).masked_fill(~mask.unsqueeze(-1), 0)


USUAL_TIMEOUT_S = 30
_LINKS: dict[tuple[int, int], PipelineLinks] = {}


class Toy(nn.Module):
    """The whole model, ``num_blocks`` blocks. A parallel one keeps only its stages' parts, see ``ToyProgram``."""

    def __init__(self, num_blocks: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embedding = nn.Parameter(torch.empty(VOCAB, HIDDEN, dtype=dtype))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks)).to(dtype)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def begin(self, input_ids: Tensor) -> Values:
        hidden = self.embedding[input_ids]
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return hidden, hidden * 2, positions, input_ids > 1, hidden.sum(-1)

    def middle(self, index: int, values: Values) -> Values:
        hidden, skip, positions, mask, unused = values
        return self.blocks[index](hidden, positions, mask), skip, positions, mask, unused

    def end(self, values: Values, labels: Tensor | None) -> Output:
        hidden, skip, *_ = values
        logits = (hidden + skip) @ self.embedding.t()
        return Output(None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        values = self.begin(input_ids)
        for index in range(len(self.blocks)):
            values = self.middle(index, values)
        return self.end(values, labels)


class ToyProgram:
    """The stages of one rank: one block each, the embedding with the first, the head with the last."""

    def __init__(self, model: Toy, holders: Sequence[int], links: PipelineLinks) -> None:
        self.model, self.num_stages, self.links = model, len(holders), links
        self.mine = [stage for stage, holder in enumerate(holders) if holder == links.axis.rank]
        self.tied = holders[0] != holders[-1]
        self.holds_embedding = links.axis.rank in (holders[0], holders[-1])
        self.sleep_s = 0.0  # of every forward and every backward
        self.checkpointed = False
        self.fail_at: tuple[str, int, int] | None = None  # ("forward" or "backward", stage, micro-batch)
        self.calls: Counter[str] = Counter()  # forwards and backwards of blocks

    def named_parameters(self) -> dict[str, nn.Parameter]:
        held = {"embedding": self.model.embedding} if self.holds_embedding else {}
        held |= {f"blocks.{stage}.{name}": p for stage in self.mine for name, p in self.model.blocks[stage].named_parameters()}
        return {name: parameter for name, parameter in held.items() if parameter.requires_grad}

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named_parameters().values())

    def fully_sharded(self) -> None:
        return None

    def run(self, stage: int, received: Values, micro: MicroBatch) -> Values | Output:
        if self.fail_at == ("forward", stage, micro.index):
            raise ArithmeticError(f"stage {stage} cannot")
        values = self.model.begin(micro.kwargs["input_ids"]) if stage == 0 else received
        block = self.model.blocks[stage]
        hidden, skip, positions, mask, unused = values
        inputs = hidden, positions, mask
        hidden = checkpoint(block, *inputs, use_reentrant=False) if self.checkpointed else block(*inputs)
        hidden = _Watch.apply(hidden, self, ("backward", stage, micro.index))
        time.sleep(self.sleep_s)
        self.calls["forward"] += 1
        values = hidden, skip, positions, mask, unused
        return self.model.end(values, micro.kwargs.get("labels")) if stage == self.num_stages - 1 else values

    def finish_gradients(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """One all-reduce for the embedding, in which the ranks without it take part with zeros."""
        if self.tied and self.model.embedding.requires_grad:
            index = list(self.named_parameters()).index("embedding") if self.holds_embedding else None
            mine = None if index is None else gradients[index]
            total = torch.zeros_like(self.model.embedding) if mine is None else mine
            dist.all_reduce(total, group=self.links.control)
            if index is not None:
                gradients[index] = total
        return gradients


class _Watch(torch.autograd.Function):
    """Sleeps, counts and fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, program: ToyProgram, at: tuple[str, int, int]) -> Tensor:
        ctx.program, ctx.at = program, at
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.program.fail_at == ctx.at:
            raise ArithmeticError(f"stage {ctx.at[1]} cannot")
        time.sleep(ctx.program.sleep_s)
        ctx.program.calls["backward"] += 1
        return gradient, None, None


class ToyPipeline(nn.Module):
    """The toy on one rank of a pipeline, with the interface of a parallelized model."""

    def __init__(self, runtime: PipelineRuntime, program: ToyProgram, micro_batch_size: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(program.parameters())  # what DDP and optimizers see
        self.runtime, self.program, self.micro_batch_size = runtime, program, micro_batch_size

    def split(self, batch: dict[str, Tensor]) -> list[MicroBatch]:
        return weigh_by_labels(split_batch(batch, self.micro_batch_size), shift_labels=False)

    def forward(self, **batch: Tensor) -> Any:
        if torch.is_grad_enabled():
            return open_loop(self.runtime, self.split(batch))
        return self.runtime.evaluate(split_batch(batch, self.micro_batch_size))

    def train_step(self, batch: dict[str, Tensor]) -> Tensor:
        return train_step(self.runtime, self.split(batch))

    def loop_step(self, batch: dict[str, Tensor]) -> Tensor:
        """The user's loop; the sum of its losses."""
        losses = []
        for micro in self(**batch):
            losses.append(micro.loss.detach())
            micro.loss.backward()
        return torch.stack(losses).sum()

    def gradients(self) -> dict[str, Tensor | None]:
        """By name, and cleared."""
        found = {}
        for name, parameter in self.program.named_parameters().items():
            found[name], parameter.grad = parameter.grad, None
        return found


def toy_pipeline(
    schedule: str,
    *,
    pp: int | None = None,
    micro_batch_size: int = 2,
    dtype: torch.dtype = torch.float64,
    timeout_s: float = USUAL_TIMEOUT_S,
    frozen: Sequence[str] = (),
) -> ToyPipeline:
    """Build this rank's part in a world of dp x pp ranks. ``frozen``: beginnings of parameter names that do not train."""
    pp = pp or dist.get_world_size()
    links = links_of(pp, timeout_s)
    model = toy(num_stages(schedule, pp), dtype, frozen)
    program = ToyProgram(model, rank_of_stage(schedule, pp), links)
    runtime = PipelineRuntime(program, links, schedule=schedule, device=torch.device("cpu"))
    return ToyPipeline(runtime, program, micro_batch_size)


def links_of(pp: int, timeout_s: float) -> PipelineLinks:
    """Process groups stay, with a thread each, as long as the rank does: toys share them unless they want their own timeout."""
    world = dist.get_world_size()
    key = (world, pp)
    if timeout_s == USUAL_TIMEOUT_S and key in _LINKS:
        _LINKS[key].traffic.clear()
        return _LINKS[key]
    links = PipelineLinks.create([list(range(at, at + pp)) for at in range(0, world, pp)], timedelta(seconds=timeout_s))
    if timeout_s == USUAL_TIMEOUT_S:
        _LINKS[key] = links
    return links


def toy(num_blocks: int, dtype: torch.dtype = torch.float64, frozen: Sequence[str] = ()) -> Toy:
    model = Toy(num_blocks, dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    return model


def batch_of(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Random ids; about a third of the labels is ignored, and all of the last two rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (rows, length), generator=generator)
    labels = torch.randint(VOCAB, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.3] = -100
    labels[-2:] = -100
    return {"input_ids": ids, "labels": labels}


def reference(model: Toy, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of the unsplit model."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_equal_gradients(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Every gradient this rank holds, within 1e-9."""
    for name, gradient in found.items():
        assert (gradient is None) == (expected[name] is None), name
        if gradient is not None:
            assert not gradient.requires_grad, name
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=f"{name} is wrong")
