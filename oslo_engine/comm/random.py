"""Random streams: which ranks draw the same dropout masks, and which draw different ones.

Three levels, each forked from the one above by a number drawn from it, so that nothing has to be kept besides the ambient state
of torch's generators:

* A *batch* stream per training forward, seeded from (seed, dp rank, step, micro-batch). It is the same on every tp rank,
  whatever the user's own generators hold; replicated activations outside the blocks draw from it.
* A *block* stream per block call of a pipeline. Every stage draws seeds for the blocks it does not run, too, so that two stages
  never draw the same masks for different blocks.
* A *sharded* stream per tp rank inside a region, where each rank has other heads or features.

Activation checkpointing restores the ambient state before it recomputes a block; the same forks follow, and the same masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_State = list[Tensor]
_RANK_BITS = 16


class RandomStreams:
    """The streams of one rank.

    Args:
        seed: the same on all ranks of the model.
        dp_rank, tp_rank: coordinates.
        device: whose generator is forked besides the CPU's.
    """

    def __init__(self, seed: int, *, dp_rank: int, tp_rank: int, device: torch.device) -> None:
        self.seed, self.dp_rank, self.tp_rank, self.device = seed, dp_rank, tp_rank, device
        self.step = 0
        self.enabled = False
        self._batch_seed = 0
        self._ambient: _State | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomStreams:
        return self

    def next_step(self) -> None:
        """Begin a training forward.

        Always with streams of our own: models draw random numbers for more than dropout (noise in a router, skipped layers),
        and what nobody had thought of would part the ranks.
        """
        self.step += 1
        self.enabled = True

    @contextmanager
    def batch(self, micro_batch: int = 0, *, step: int | None = None) -> Iterator[None]:
        """Run a training forward on the stream of (step, micro-batch); the user's generators are left as they were."""
        if not self.enabled:
            yield
            return
        saved = self._save()
        self._batch_seed = mix(self.seed, self.dp_rank, self.step if step is None else step, micro_batch)
        self._seed(self._batch_seed)
        try:
            yield
        finally:
            self._ambient = None
            self._restore(saved)

    @contextmanager
    def block(self, *, per_rank: bool = False) -> Iterator[None]:
        """Run one block call on its own stream; on one of this tp rank's own where its activations are split."""
        if not self.enabled:
            yield
            return
        seed = self.draw()
        saved = self._save()
        self._seed(mix(seed, self.tp_rank) if per_rank else seed)
        try:
            yield
        finally:
            self._restore(saved)

    @contextmanager
    def common(self, what: str) -> Iterator[None]:
        """Draw the same on every stage, whatever each drew before: for what several stages compute outside the blocks."""
        if not self.enabled:
            yield
            return
        saved = self._save()
        self._seed(mix(self._batch_seed, int.from_bytes(what.encode(), "little")))
        try:
            yield
        finally:
            self._restore(saved)

    def enter_sharded(self) -> None:
        """From here on each tp rank draws its own masks, until ``leave_sharded``."""
        if self.enabled:
            self._enter()

    def leave_sharded(self) -> None:
        """Back to the stream that all tp ranks share."""
        if self._ambient is not None:
            self._leave()

    # Where torch.compile compiles a block it breaks its graph here: what is drawn in one graph comes from one stream.

    @torch.compiler.disable
    def _enter(self) -> None:
        seed = self.draw()
        # A recompute that stopped early may have left a region without leaving its stream: what was saved then is stale.
        self._ambient = self._save()
        self._seed(_number_of_rank(seed, self.tp_rank))

    @torch.compiler.disable
    def _leave(self) -> None:
        assert self._ambient is not None
        self._restore(self._ambient)
        self._ambient = None

    @contextmanager
    def alike(self, what: str) -> Iterator[None]:
        """Within a region, draw the same on every tp rank: for a replicated activation that is used there.

        What is drawn follows from the state of the generator alone, so that a recompute of any part of the region draws it
        again; it is the same at every call of ``what`` in one pass of the region.
        """
        if not self.enabled:
            yield
            return
        common = torch.default_generator.initial_seed() >> _RANK_BITS
        saved = self._save()
        self._seed(mix(common, what))
        try:
            yield
        finally:
            self._restore(saved)

    def draw(self) -> int:
        """One number of the ambient stream, equal on every rank that shares it. Drawn on the host: no device is waited for."""
        return int(torch.empty((), dtype=torch.int64).random_())

    def _generators(self) -> list[torch.Generator]:
        generators = [torch.default_generator]
        if self.device.type == "cuda":
            generators.append(torch.cuda.default_generators[self.device.index or 0])
        return generators

    def _save(self) -> _State:
        return [generator.get_state() for generator in self._generators()]

    def _restore(self, states: _State) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)

    def _seed(self, seed: int) -> None:
        for generator in self._generators():
            generator.manual_seed(seed)


def _number_of_rank(seed: int, tp_rank: int) -> int:
    """The seed of a rank's sharded stream. Its upper bits are the same on every tp rank: ``alike`` reads them again."""
    return (mix(seed) >> _RANK_BITS << _RANK_BITS) | tp_rank


def mix(*numbers: int | str) -> int:
    """A seed that follows from numbers and names."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
