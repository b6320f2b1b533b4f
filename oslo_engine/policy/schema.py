"""What a policy file may say. See docs/policies.md for the words and policies/*.yaml for examples."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_NAME = r"[A-Za-z_]\w*(\.\w+)*"
_EXPRESSION = re.compile(rf"\s*({_NAME}|\d+)(\s*[*/+-]\s*({_NAME}|\d+))*\s*")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, int)) and not isinstance(value, bool) else value


def _is_expression(value: Any) -> Any:
    text = str(value)
    if not _EXPRESSION.fullmatch(text):
        raise ValueError(f"{text!r} is not an expression of names, whole numbers and * / + -")
    return text


Expression = Annotated[str, BeforeValidator(_is_expression)]
Parts = Annotated[tuple[Expression, ...], BeforeValidator(_as_list), Field(min_length=1)]
Values = Annotated[tuple[Expression, ...], BeforeValidator(_as_list), Field(min_length=1)]


class Unit(_Strict):
    """Something that is dealt to the tp ranks whole: heads, KV heads, groups.

    count: how many there are, an expression of config attributes and of attributes of the region's module.
    per: another unit whose items these share out (query heads per KV head).
    blocks: the items come in this many blocks, each of which is dealt by itself.
    """

    count: Expression
    per: str | None = None
    blocks: Expression = "1"


def _as_unit(value: Any) -> Any:
    return {"count": value} if isinstance(value, (str, int)) else value


AsUnit = Annotated[Unit, BeforeValidator(_as_unit)]


class Cut(_Strict):
    """One more parameter or buffer that is cut: its parts along a dimension, each ``unit`` or ``unit * width``."""

    unit: Parts
    dim: int = 0


def _as_cut(value: Any) -> Any:
    return {"unit": value} if isinstance(value, (str, list)) else value


class Argument(_Strict):
    """An argument of the scope's forward that is whole and has a dimension of items: an additive bias by head.

    unit: ``unit`` or ``unit * width``.
    repeated: the dimension holds the items again and again (batch times heads in one dimension).
    """

    unit: Expression
    dim: int
    repeated: bool = False


class Norm(_Strict):
    """A norm whose features are cut. within: the unit whose items it normalises separately; none: all features together."""

    unit: Parts
    within: str | None = None


class Experts(_Strict):
    """How whole experts are dealt to the tp ranks (``expert_split="expert"``).

    count: how many there are.
    parameters: parameters whose first dimension is the experts.
    index, weights: arguments of the scope's forward that say to which experts each token goes, and how much.
    set: attributes, as in a region; ``expert`` is the unit.
    """

    count: Expression
    parameters: tuple[str, ...] = Field(min_length=1)
    index: str = "top_k_index"
    weights: str = "top_k_weights"
    set: dict[str, Values] = {}


class Region(_Strict):
    """A part of a block where every rank computes its share: column-cut inputs, row-cut outputs.

    at: the module that the other names are relative to; itself relative to the block, ``*`` stands for one name.
    when: attribute -> value: the region stands only where the config or the anchor has these.
    needs: a module of the anchor without which the region is not there (two kinds of attention under one name).
    scope: the module whose inputs enter the region (all that is uncut inside it gets partial, summed gradients).
    inputs: arguments of the scope's forward that carry replicated activations in; none given: the first one.
    enter: where they enter: at the scope, or at each column module (which then share one gradient sum).
    leave: what is summed over the ranks: the outputs of the rows, or that of the scope.
    columns: module -> unit, or the parts of its output features in order.
    rows: module -> unit of its input features; its bias is added once.
    inner: rows whose whole output the region goes on with.
    cut: parameter or buffer -> unit and dimension, for what is neither.
    arguments: argument of the scope's forward -> unit and dimension; each rank gets the entries of its items.
    norms: module whose features are cut -> unit; it normalises by the statistics of all ranks (or within items of a unit).
    sum: uncut parameters outside the scope whose gradients are partial.
    once: parameters that every rank would add to its part of a sum: each adds its share.
    experts: what instead is cut where whole experts are dealt out.
    set: attribute -> value on each rank (a list for a list), expressions of units, config and module attributes.
    units: units of this region only.
    optional: whether a model may lack this region altogether.

    ``maybe`` before a name: it may match nothing.
    """

    at: str = ""
    when: dict[str, bool | int | str] = {}
    needs: str = ""
    scope: str = ""
    inputs: tuple[str, ...] = ()
    enter: Literal["scope", "columns"] = "scope"
    leave: Literal["rows", "scope"] = "rows"
    columns: dict[str, Parts] = {}
    rows: dict[str, Parts] = {}
    inner: dict[str, Parts] = {}
    cut: dict[str, Annotated[Cut, BeforeValidator(_as_cut)]] = {}
    arguments: dict[str, Argument] = {}
    norms: dict[str, Annotated[Norm, BeforeValidator(_as_cut)]] = {}
    sum: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    experts: Experts | None = None
    set: dict[str, Values] = {}
    units: dict[str, AsUnit] = {}
    optional: bool = False

    @model_validator(mode="after")
    def _check_ends(self) -> Region:
        if not (self.columns or self.cut):
            raise ValueError("a region needs columns, or parameters to cut")
        if not (self.rows or self.leave == "scope"):
            raise ValueError("a region needs rows, or leave: scope")
        if self.enter == "columns" and (self.scope or self.inputs or self.arguments):
            raise ValueError("scope, inputs and arguments say nothing where activations enter at the columns")
        return self


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
    replicate: part of a parameter's name -> why each rank holds it whole.
    whole_batch: why the rows of a batch influence one another, so that a pipeline, which cuts batches, is refused.
    refuse: config attribute -> why a model in which it is set cannot be cut.
    not_with: package -> why the model cannot be cut where it is installed (kernels that bypass the modules).
    sequence_parallel: whether nothing outside the regions mixes tokens.
    """

    name: str
    models: tuple[str, ...] = Field(min_length=1)
    stacks: dict[str, str] = Field(min_length=1)
    units: dict[str, AsUnit] = {}
    regions: dict[str, Region] = {}
    vocabulary: Vocabulary = Vocabulary()
    replicate: dict[str, str] = {}
    whole_batch: str = ""
    refuse: dict[str, str] = {}
    not_with: dict[str, str] = {}
    sequence_parallel: bool = False
    # Set by the loader; a file cannot say them.
    origin: str = Field(default="", exclude=True, validation_alias="(origin)")
    lines: dict[str, str] = Field(default={}, exclude=True, validation_alias="(lines)")

    def where(self, *path: str) -> str:
        """``file:line`` of an entry, or of the nearest one above it."""
        for depth in range(len(path), -1, -1):
            line = self.lines.get(".".join(path[:depth]))
            if line is not None:
                return line
        return self.origin
