"""Running one pipeline stage: the model's own forward, with the blocks of other stages answered in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from oslo_engine.comm.random import RandomStreams
from oslo_engine.errors import PipelineError
from oslo_engine.pipeline.ghost_cache import feed_ghosts
from oslo_engine.rewrite.cache_calls import find_cache, first_tensor
from oslo_engine.rewrite.collected import Collected
from oslo_engine.rewrite.dataflow import Call, DataFlow
from oslo_engine.rewrite.structure import Path, Structure, TensorSlot, arguments_of, at, rebuild
from oslo_engine.rewrite.values import Value


class StageDone(Exception):
    """Ends the forward of a stage that is not the last: all it has to send is there."""


class StageRun:
    """Answers every call of a switchable module during one forward of one stage.

    A block of an earlier stage returns what was received of it, and zeros for what nobody needs; this stage's blocks run; the
    last of them ends the forward. A module outside the blocks runs if this stage needs it; otherwise it answers zeros.

    Args:
        model: this rank's.
        twin: the unsplit model on meta, asked for the shapes of what is not computed.
        flow: of this call of the model.
        received: the values of ``flow.carried[stage]``.
    """

    def __init__(
        self,
        model: nn.Module,
        twin: nn.Module,
        flow: DataFlow,
        stage: int,
        received: tuple[Tensor, ...],
        streams: RandomStreams,
    ) -> None:
        self.model, self.twin, self.flow, self.stage, self.streams = model, twin, flow, stage, streams
        self.values: dict[Value, Tensor] = dict(zip(flow.carried[stage], received, strict=True))
        self.is_last = stage == flow.num_stages - 1
        self.wanted = _own_collected(flow) if self.is_last else flow.carried[stage + 1]
        self.numbers = {call: number for number, call in enumerate(flow.calls)}
        self.last_own = max((number for number, owner in enumerate(flow.stage_of_call) if owner == stage), default=None)
        self.drawn_alike = {(draw.module, draw.nth) for draw in flow.random_in_several_stages}
        self.counts: Counter[str] = Counter()

    def __call__(
        self, name: str, module: nn.Module, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        nth = self.counts[name]
        self.counts[name] += 1
        number = self.numbers.get(Call(name, nth))
        if number is None:
            return self._outside(name, nth, run, args, kwargs)
        owner = self.flow.stage_of_call[number]
        # Every stage draws a seed for every block call, so that blocks of different stages draw different masks.
        with self.streams.block() if module.training else nullcontext():
            if owner == self.stage:
                output = run()
        if owner == self.stage:
            self._keep(number, output, args, kwargs)
            if number == self.last_own and not self.is_last:
                self._end(number + 1, args, kwargs)
            return output
        if owner > self.stage:  # this stage has no block in this call of the model
            self._end(number, args, kwargs)
        self._feed_ghosts([number], args, kwargs)
        return self._answer(number, args, kwargs)

    @property
    def only_relays(self) -> bool:
        """Whether this stage has nothing to run: all blocks of this call of the model come before it."""
        return not self.is_last and max(self.flow.stage_of_call) < self.stage

    def outgoing(self) -> tuple[Tensor, ...]:
        """What the next stage receives, after the forward has ended.

        Raises:
            PipelineError: the forward did not produce a value that the recording promised.
        """
        missing = [value for value in self.wanted if value not in self.values]
        if missing:
            raise PipelineError(
                "the forward of a stage did not produce all it has to send",
                where=f"stage {self.stage}",
                expected=", ".join(f"{self.flow.calls[value.call].block}{list(value.path)}" for value in missing),
                hint="the model took another path than the one recorded for these arguments",
            )
        return tuple(self.values[value] for value in self.wanted)

    def finished(self, output: Any) -> Any:
        """The model's output, with the hidden states of all stages where they were asked for."""
        for one in self.flow.collected:
            output[one.key] = self._hidden_states(one, output[one.key])
        return output

    def _hidden_states(self, wanted: Collected, computed: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``computed`` lacks those of other stages, or has stand-ins for them; what this stage computed is at its end."""
        total, states = len(wanted.entries), []
        for index, value in enumerate(wanted.entries):
            if value is None and total - index <= len(computed):
                states.append(computed[index - total])
            elif value in self.values:
                states.append(self.values[value])
            else:
                raise PipelineError(
                    "a hidden state is not among what the stages of a pipeline compute",
                    where=f"{wanted.key}[{index}]",
                    expected="what a block was given or returned, or what is computed behind the last block",
                    hint="leave output_hidden_states off, or use pp=1",
                )
        return tuple(states)

    def _outside(self, name: str, nth: int, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in self.flow.dead_modules[self.stage]:
            return _zeros(self.twin.get_submodule(name), args, kwargs, self.streams.device)
        if (name, nth) in self.drawn_alike:
            with self.streams.common(f"{name} {nth}"):
                return run()
        return run()

    def _keep(self, number: int, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in self.wanted:
            if value.call == number:
                self.values[value] = at(arguments_of(args, kwargs) if value.written else output, value.path)

    def _end(self, next_call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._feed_ghosts(range(next_call, len(self.flow.calls)), args, kwargs)
        raise StageDone

    def _feed_ghosts(self, numbers: Iterable[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the layers of a cache that belong to blocks of other stages in step with the others."""
        cache = find_cache((args, kwargs))
        if cache is not None:
            for number in numbers:
                feed_ghosts(self.flow.cached[number], first_tensor((args, kwargs)), cache)

    def _answer(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a block of an earlier stage would have returned, and written into its arguments."""
        arguments, like = arguments_of(args, kwargs), first_tensor((args, kwargs))

        def build(structure: Structure, prefix: Path = (), written: bool = False) -> Any:
            def tensor_at(path: Path, slot: TensorSlot) -> Tensor:
                return self.values.get(Value(number, (*prefix, *path), written), _nothing(slot, like))

            return rebuild(structure, tensor_at, arguments)

        for entry in self.flow.written[number]:
            at(arguments, entry.path)[entry.key] = build(entry.value, (*entry.path, entry.key), written=True)
        return build(self.flow.outputs[number])


def _own_collected(flow: DataFlow) -> tuple[Value, ...]:
    """What the last stage's own blocks give of the hidden states that are returned."""
    values = (value for one in flow.collected for value in one.entries if value is not None)
    return tuple(value for value in values if flow.stage_of_call[value.call] == flow.num_stages - 1)


def _nothing(slot: TensorSlot, like: Tensor) -> Tensor:
    """Stands for a tensor nobody needs: one zero, in the shape of the hidden states where it has as many dimensions."""
    shape = like.shape if slot.ndim == like.ndim else (1,) * slot.ndim
    dtype = like.dtype if like.is_floating_point() else getattr(torch, slot.dtype)
    return torch.zeros((), dtype=dtype, device=like.device).expand(shape)


def _zeros(twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """The output of a module nobody needs: shapes from its twin on meta. Real zeros: models scale embeddings in place."""
    on_meta = pytree.tree_map_only(Tensor, lambda leaf: leaf.to("meta"), (args, kwargs))
    with torch.no_grad():
        output = twin(*on_meta[0], **on_meta[1])
    return pytree.tree_map_only(Tensor, lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype, device=device), output)
