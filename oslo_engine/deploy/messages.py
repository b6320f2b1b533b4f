"""What the parent and its workers say to each other.

Messages are pickled by value and go through one pipe for each worker: no shared memory is used, so a container's small
``/dev/shm`` is enough.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """The rows of one generate call that may be run together with those of others.

    ids: [rows, length]; mask: the same shape, or None where the call had none.
    max_new_tokens: after which its rows end; None where the settings or the model's own say so.
    streams: whether its tokens (of one row) are sent as soon as they are known.
    """

    ids: Tensor
    mask: Tensor | None = None
    max_new_tokens: int | None = None
    streams: bool = False


# To the workers.


@dataclass(frozen=True)
class RunMethod:
    """Call a method of the model.

    seed: of torch, before it. defaults: settings of ``model.generation_config`` that the parent has changed.
    """

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int | None = None
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunPrompts:
    """Generate from several prompts at once, all with these settings (arguments of ``generate``)."""

    number: int
    prompts: tuple[Prompt, ...]
    settings: dict[str, Any]
    seed: int | None = None
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """Nobody wants the tokens of this prompt any more. To rank 0, while ``number`` runs."""

    number: int
    prompt: int


@dataclass(frozen=True)
class Stop:
    """End."""


# From the workers.


@dataclass(frozen=True)
class Traits:
    """What the parent must know of the model.

    mixes_lengths: whether prompts of different lengths, padded on the left, give what each gives alone.
    dtype, can_generate: of the model. modalities: what it reads and what it writes.
    """

    config: Any
    generation_config: Any
    mixes_lengths: bool
    dtype: Any = None
    can_generate: bool = True
    modalities: tuple[Any, Any] = ("text", "text")


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    traits: Traits


@dataclass(frozen=True)
class Tokens:
    """New tokens of prompts that stream: pairs of the prompt's index and a token."""

    number: int
    tokens: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Result:
    """A call has ended well. ``value`` is what it returned, packed; only rank 0 sends it.

    sequence: how many collectives each process group has run.
    """

    number: int
    value: bytes | None
    sequence: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Problem:
    """A call, or (number -1) the start, has ended with an exception. ``error`` is it, packed, where that is possible."""

    number: int
    error: bytes | None
    summary: str
    trace: str
    sequence: tuple[tuple[str, int], ...] = ()


def pack(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def receive(pipe: Connection) -> Any:
    """The next message. Raises EOFError or an OSError where the other side has ended."""
    return pickle.loads(pipe.recv_bytes())
