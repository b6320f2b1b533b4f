"""The plan: pure data that says what every rank holds. Built on ``meta``, without a process group."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from oslo_engine.shards import Shard, Span
from oslo_engine.topology import Coordinate, Topology

# Names that wrappers give to the module within: torch's activation checkpointing, torch.compile, PEFT's adapters.
_WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod|base_layer)\.")


def without_wrappers(name: str) -> str:
    """The name that a parameter or module had before modules around it were wrapped."""
    return _WRAPPERS.sub("", name)


@dataclass(frozen=True)
class TensorPlan:
    """One logical tensor: a parameter (tied names are one), or a buffer.

    name, aliases: its first name, and all of them.
    shape, dtype: of the whole tensor.
    shard: how the tp ranks divide it; None where each holds the whole.
    stages: the pipeline stages that hold it.
    partial: whether each tp rank's gradient is a partial sum (uncut parameters inside a region).
    persistent: whether it belongs to the state dict.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    shard: Shard | None = None
    stages: tuple[int, ...] = (0,)
    partial: bool = False
    is_buffer: bool = False
    persistent: bool = True

    def local_shape(self, tp_rank: int) -> tuple[int, ...]:
        return self.shape if self.shard is None else self.shard.local_shape(self.shape, tp_rank)


@dataclass(frozen=True)
class ArgumentPlan:
    """An argument of a scope's forward of which each tp rank takes the items of its spans along ``dim``.

    size: items of the whole; repeated: whether the dimension holds them again and again.
    """

    name: str
    dim: int
    size: int
    spans: tuple[tuple[Span, ...], ...]
    repeated: bool


@dataclass(frozen=True)
class NormPlan:
    """A norm over cut features.

    size: features that are normalised together. groups: how many such sets there are; spans: those of which each tp rank holds
    features. holders: (features, how many ranks hold them) of each rank, in order, where some are replicated (KV heads).
    """

    module: str
    size: int
    groups: int
    spans: tuple[Span, ...]
    holders: tuple[tuple[tuple[int, int], ...], ...] = ()


@dataclass(frozen=True)
class ExpertsPlan:
    """Whole experts on each tp rank: arguments that name and weigh them, and the experts of each rank."""

    index: str
    weights: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class RegionPlan:
    """One matched region.

    scope: module whose ``inputs`` (arguments of its forward; none given: the first) enter.
    enter, leave: where, as in the policy.
    columns, rows, inner: the modules cut.
    once: parameters of which every rank adds its share.
    attributes: (module, attribute, value on each tp rank).
    """

    name: str
    scope: str
    inputs: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    attributes: tuple[tuple[str, str, tuple[int | tuple[int, ...], ...]], ...]
    enter: str = "scope"
    leave: str = "rows"
    inner: tuple[str, ...] = ()
    norms: tuple[NormPlan, ...] = ()
    arguments: tuple[ArgumentPlan, ...] = ()
    summed: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    experts: ExpertsPlan | None = None


@dataclass(frozen=True)
class BlockCallPlan:
    """One call of a repeated block: its ``nth`` (from 0), and the stage that runs it."""

    block: str
    nth: int
    stage: int


@dataclass(frozen=True)
class Plan:
    """What each rank of a topology holds and runs.

    embeddings, heads: vocabulary-parallel modules with the vocabulary rows of each tp rank.
    replicated: (parameter, why every tp rank holds it whole).
    calls: the block calls of a forward in order, with their stages.
    rank_of_stage: the pp rank that runs each stage.
    """

    policy: str
    model: str
    topology: Topology
    schedule: str
    sequence_parallel: bool
    num_stages: int
    rank_of_stage: tuple[int, ...]
    tensors: tuple[TensorPlan, ...]
    regions: tuple[RegionPlan, ...]
    embeddings: tuple[tuple[str, tuple[int, ...]], ...]
    heads: tuple[tuple[str, tuple[int, ...]], ...]
    replicated: tuple[tuple[str, str], ...]
    stacks: tuple[tuple[str, tuple[str, ...]], ...]
    calls: tuple[BlockCallPlan, ...]

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(block for _, blocks in self.stacks for block in blocks)

    @property
    def parameters(self) -> tuple[TensorPlan, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.is_buffer)

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == pp_rank)

    def holders(self, tensor: TensorPlan) -> tuple[int, ...]:
        """The pp ranks that hold a tensor, ascending."""
        return tuple(sorted({self.rank_of_stage[stage] for stage in tensor.stages}))

    def held_by(self, pp_rank: int) -> Iterator[TensorPlan]:
        return (tensor for tensor in self.tensors if pp_rank in self.holders(tensor))

    def tensor(self, name: str) -> TensorPlan:
        """The tensor that has this name or alias, also where modules were wrapped since (checkpointing, torch.compile, PEFT).

        Raises:
            KeyError: there is none.
        """
        found = self._by_name.get(name)
        return self._by_name[without_wrappers(name)] if found is None else found

    def knows(self, name: str) -> bool:
        """Whether ``tensor`` finds one of this name."""
        return name in self._by_name or without_wrappers(name) in self._by_name

    @property
    def _by_name(self) -> dict[str, TensorPlan]:
        table: dict[str, TensorPlan] | None = self.__dict__.get("_table")
        if table is None:
            table = {alias: tensor for tensor in self.tensors for alias in tensor.aliases}
            object.__setattr__(self, "_table", table)
        return table

    def numel_on(self, at: Coordinate) -> int:
        """Parameters held by one rank."""
        total = 0
        for tensor in self.held_by(at.pp_rank):
            if not tensor.is_buffer:
                count = 1
                for size in tensor.local_shape(at.tp_rank):
                    count *= size
                total += count
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON (golden files, ``layout.json``)."""
        return dataclasses.asdict(self)
