"""What a policy file may say. See docs/policies.md for the words and policies/*.yaml for examples."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_EXPRESSION = re.compile(rf"\s*({_NAME}|\d+)(\s*[*/+-]\s*({_NAME}|\d+))*\s*")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _as_parts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Parts = Annotated[tuple[str, ...], BeforeValidator(_as_parts), Field(min_length=1)]


class Unit(_Strict):
    """Something that is dealt to the tp ranks whole: heads, KV heads.

    count: the config attribute that says how many there are.
    per: another unit whose items these share out (query heads per KV head).
    """

    count: str
    per: str | None = None


def _as_unit(value: Any) -> Any:
    return {"count": value} if isinstance(value, str) else value


class Cut(_Strict):
    """One more parameter cut by a unit: a relative position bias by head."""

    unit: str
    dim: int = 0


class Region(_Strict):
    """A part of a block where every rank computes its share: column-cut inputs, row-cut outputs.

    at: the module that the other names are relative to; itself relative to the block, ``*`` stands for one name.
    scope: the module whose inputs enter the region (all that is uncut inside it gets partial, summed gradients).
    inputs: arguments of the scope's forward that carry replicated activations into the region.
    columns: module -> unit, or the units of its parts in order where several projections are packed into one weight.
    rows: module -> unit of its input features; its output is summed over the ranks, its bias added once.
    cut: parameter -> unit and dimension, for what is neither.
    set: attribute -> value on each rank, an expression of units, config attributes and the module's own attributes.
    optional: whether a model may lack this region altogether.
    """

    at: str = ""
    scope: str = ""
    inputs: tuple[str, ...] = ("hidden_states",)
    columns: dict[str, Parts] = Field(min_length=1)
    rows: dict[str, str] = Field(min_length=1)
    cut: dict[str, Cut] = {}
    set: dict[str, str] = {}
    optional: bool = False

    @field_validator("set")
    @classmethod
    def _check_expressions(cls, value: dict[str, str]) -> dict[str, str]:
        for attribute, expression in value.items():
            if not _EXPRESSION.fullmatch(expression):
                raise ValueError(f"{attribute}: {expression!r} is not an expression of names, whole numbers and * / + -")
        return value


class Vocabulary(_Strict):
    """Modules cut along the vocabulary: embeddings, heads, and parameters (a bias kept outside the head)."""

    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


class Policy(_Strict):
    """How one family of architectures may be split.

    models: the ``config.model_type``s it serves.
    stacks: repeated blocks in the order they run; pipeline cuts lie between blocks.
    units, regions, vocabulary: what tensor parallelism deals out.
    """

    name: str
    models: tuple[str, ...] = Field(min_length=1)
    stacks: dict[str, str] = Field(min_length=1)
    units: dict[str, Annotated[Unit, BeforeValidator(_as_unit)]] = {}
    regions: dict[str, Region] = Field(min_length=1)
    vocabulary: Vocabulary = Vocabulary()
    origin: str = Field(default="", exclude=True)
    lines: dict[str, str] = Field(default={}, exclude=True)

    def where(self, *path: str) -> str:
        """``file:line`` of an entry, or of the nearest one above it."""
        for depth in range(len(path), -1, -1):
            line = self.lines.get(".".join(path[:depth]))
            if line is not None:
                return line
        return self.origin
