"""What is to be verified: sizes of the model, layout, numbers. Plain data that every rank gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from oslo_engine.errors import BatchError, PlanError
from oslo_engine.pipeline.orders import num_stages
from oslo_engine.topology import Topology

DType = Literal["float32", "float64", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = ("float32", "float64", "bfloat16", "float16")
DEFAULT_SCHEDULE = "1f1b"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model that differ from the tiny ones; None: what ``shrink`` chooses (the config's own with ``full``).

    full: keep the config's sizes.
    tied: whether the embedding and the head are one parameter; None: as the config says.
    """

    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    layers: int | None = None
    tied: bool | None = None
    full: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "vocab", "layers"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise PlanError("a size must be a positive integer", where=name, expected=">= 1", got=repr(value))
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise PlanError(
                "query heads must be a multiple of KV heads",
                where=f"heads={self.heads}, kv_heads={self.kv_heads}",
                expected=f"a divisor of {self.heads}",
                got=str(self.kv_heads),
            )


@dataclass(frozen=True)
class Settings:
    """How the model is split and run; see ``oslo_engine.verify.verify``.

    policy: resolved; None only where tp and pp are 1.
    """

    tp: int = 1
    pp: int = 1
    schedule: str = DEFAULT_SCHEDULE
    micro_batch_size: int = 2
    sequence_parallel: bool = False
    policy: Any = None
    dtype: DType = "float32"
    dropout: float = 0.0
    gradient_checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        Topology(tp=self.tp, pp=self.pp)
        num_stages(self.schedule, self.pp)  # type: ignore[arg-type]  # raises for an unknown one
        if isinstance(self.micro_batch_size, bool) or not isinstance(self.micro_batch_size, int) or self.micro_batch_size < 1:
            raise BatchError(
                "the micro-batch size must be a positive integer", expected=">= 1 rows", got=repr(self.micro_batch_size)
            )
        if self.dtype not in DTYPES:
            raise PlanError(
                "no such number format", where="dtype", expected="one of " + ", ".join(DTYPES), got=repr(self.dtype)
            )
        if not 0 <= self.dropout < 1:
            raise PlanError(
                "a dropout probability lies between 0 and 1", where="dropout", expected="0 <= p < 1", got=str(self.dropout)
            )
        if self.schedule != DEFAULT_SCHEDULE and self.pp == 1:
            raise PlanError(
                "a schedule orders pipeline stages, and there is one",
                where=f"schedule={self.schedule}",
                expected="pp > 1",
                got="pp=1",
            )
        if self.sequence_parallel and self.tp == 1:
            raise PlanError(
                "sequence parallelism divides activations among tensor-parallel ranks, and there is one",
                where="sequence_parallel",
                expected="tp > 1",
                got="tp=1",
            )

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def num_blocks(self) -> int:
        """One more than stages, so that these are uneven; without a pipeline enough to load what was saved into one."""
        return num_stages(self.schedule, self.pp) + 1 if self.pp > 1 else max(2, self.tp)  # type: ignore[arg-type]
