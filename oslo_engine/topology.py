"""Sizes and coordinates on the three axes of parallelism. Pure arithmetic: no torch, no process group.

Ranks are laid out with tp innermost (its collectives are the most frequent), then dp, then pp:

    rank = (pp_stage * dp + dp_rank) * tp + tp_rank
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oslo_engine.errors import TopologyError

AxisName = Literal["pp", "dp", "tp"]
AXES: tuple[AxisName, ...] = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Coordinate:
    """Position of one rank: ``0 <= pp_rank < pp``, ``0 <= dp_rank < dp``, ``0 <= tp_rank < tp``."""

    pp_rank: int
    dp_rank: int
    tp_rank: int

    def on(self, axis: AxisName) -> int:
        return {"pp": self.pp_rank, "dp": self.dp_rank, "tp": self.tp_rank}[axis]


@dataclass(frozen=True)
class Topology:
    """How many ranks stand on each axis.

    Raises:
        TopologyError: a size is not a positive integer.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = self.size(axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise TopologyError(
                    f"the {axis} size must be a positive integer", where=f"{axis}={size!r}", expected=">= 1", got=repr(size)
                )

    @classmethod
    def from_world(cls, world_size: int, *, tp: int = 1, pp: int = 1) -> Topology:
        """Give every rank left over after tp and pp to data parallelism.

        Raises:
            TopologyError: tp * pp does not divide the world size.
        """
        model = cls(tp=tp, pp=pp)
        if world_size % (tp * pp):
            raise TopologyError(
                "tp * pp must divide the world size",
                where=f"tp={tp}, pp={pp}, world size={world_size}",
                expected=f"a world size that is a multiple of {tp * pp}",
                got=str(world_size),
                hint=f"launch with --nproc-per-node={tp * pp} (or a multiple), or choose other sizes",
            )
        return cls(tp=model.tp, pp=model.pp, dp=world_size // (tp * pp))

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def size(self, axis: AxisName) -> int:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}[axis]

    def coordinate(self, rank: int) -> Coordinate:
        if not 0 <= rank < self.world_size:
            raise TopologyError("rank is outside the world", expected=f"0 <= rank < {self.world_size}", got=str(rank))
        rest, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Coordinate(pp_rank, dp_rank, tp_rank)

    def rank(self, *, pp_rank: int = 0, dp_rank: int = 0, tp_rank: int = 0) -> int:
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank

    def groups(self, *axes: AxisName) -> list[list[int]]:
        """Ranks that differ only on ``axes``: ``groups("tp")``; ``groups("pp", "tp")`` for the model-parallel groups."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinate(rank)
            found.setdefault(tuple(at.on(axis) for axis in AXES if axis not in axes), []).append(rank)
        return list(found.values())
