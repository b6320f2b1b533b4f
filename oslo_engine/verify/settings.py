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
class Settings:
    """How the model is split and run; see ``oslo_engine.verify.verify``.

    policy: resolved; None only where tp and pp are 1.
    """

    tp: int = 1
    pp: int = 1
    schedule: str = DEFAULT_SCHEDULE
    micro_batch_size: int = 2
    sequence_parallel: bool = False
    expert_split: str = "inner"
    policy: Any = None
    dtype: DType = "float32"
    dropout: float = 0.0
    gradient_checkpointing: bool = False
    fuse: bool = False
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
    def attention(self) -> dict[str, str]:
        """Arguments of constructors. Eager attention calls dropout where it can be seen, and has scores to fuse."""
        return {"attn_implementation": "eager"} if self.dropout or self.fuse else {}

    @property
    def num_blocks(self) -> int:
        """One more than stages, so that these are uneven; without a pipeline enough to load what was saved into one."""
        return num_stages(self.schedule, self.pp) + 1 if self.pp > 1 else max(2, self.tp)  # type: ignore[arg-type]
