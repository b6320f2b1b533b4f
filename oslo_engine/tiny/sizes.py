"""The sizes of a tiny model that somebody asked for."""

from __future__ import annotations

from dataclasses import dataclass

from oslo_engine.errors import PlanError


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
