"""Where a rank stands among the things that the ranks of one copy of a model do together.

A forward, a batch of a pipeline, ``generate`` and a save are such things; each is a *call*, and every rank of a copy makes the
same calls in the same order, so they can be numbered. A rank that has left a call by an error which somebody caught, or that is
in another call than the others, leaves them waiting in a collective, or worse: its next collective is taken for theirs. The
numbers tell for certain, whatever the clock says.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

_REMEMBERED = 10_000  # calls; ranks are never further apart
_OF_CONNECTIONS = ("Connection closed", "Connection reset", "Connection refused", "Broken pipe", "does not answer", "NCCL")
State = Literal["inside", "outside", "done", "failed"]


@dataclass(frozen=True)
class Standing:
    """How far a rank is.

    number, kind: of the last call that it has begun.
    trail: a number that differs where the calls up to this one were of other kinds.
    state: inside it, or outside for a moment (in the body of a micro-batch loop); or what became of it.
    cause: why it failed here, if the reason lay on this rank.
    """

    number: int = 0
    kind: str = ""
    state: State = "done"
    cause: str = ""
    trail: int = 0

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Standing:
        return cls(**json.loads(text))

    def passed(self, other: Standing) -> bool:
        """Whether this rank has ended, without an error, a call in which the other one has failed."""
        return self.number > other.number or (self.number == other.number and self.state == "done")


class Calls:
    """The calls of one rank on one mesh.

    Args:
        name: of the mesh, the same on all ranks.
        rank: of this process.
        tp_ranks: of the ranks that share collectives inside every call, this one among them.
        model_ranks: of the ranks that hold one copy of the model.
    """

    def __init__(
        self, name: str = "", rank: int = 0, tp_ranks: Sequence[int] = (0,), model_ranks: Sequence[int] = (0,)
    ) -> None:
        self.name, self.rank = name, rank
        self.tp_ranks, self.model_ranks = tuple(tp_ranks), tuple(model_ranks)
        self.standing = Standing()
        self.tell: Callable[[], Any] = lambda: None  # others of a change that they may be waiting for
        self.wait_until_failed_everywhere: Callable[[], Any] = lambda: None
        self._failed: set[int] = set()
        self._begun: dict[int, Standing] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return self  # of this process

    @property
    def is_open(self) -> bool:
        return self.standing.state in ("inside", "outside")

    def begun(self, number: int) -> Standing | None:
        """A call as it was begun here; the last ones are remembered."""
        return self._begun.get(number)

    def has_failed(self, number: int) -> bool:
        return number in self._failed

    @contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """Do something together with the other ranks; inside of another call it is a part of that."""
        if self.is_open:
            yield
            return
        self.begin(kind)
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self.end()

    def begin(self, kind: str, state: State = "inside") -> None:
        """Open the next call; ``end`` or ``fail`` closes it.

        Communication: none, but after a failed call it waits, through the store, until it has failed on all tp ranks.
        """
        if self.standing.state == "failed":
            self.wait_until_failed_everywhere()
        number, trail = self.standing.number + 1, zlib.crc32(kind.encode(), self.standing.trail)
        self.standing = self._begun[number] = Standing(number, kind, state, trail=trail)
        self._begun.pop(number - _REMEMBERED, None)

    def end(self) -> None:
        if self.is_open:
            self.standing = replace(self.standing, state="done")

    def fail(self, cause: Exception | str = "") -> None:
        """Args: cause: empty where another rank is the reason, as it is of broken connections."""
        if self.is_open:
            self._failed.add(self.standing.number)
            self.standing = replace(self.standing, state="failed", cause=_told(cause))
            self.tell()
            if len(self.tp_ranks) == 1:  # a pipeline fails on all ranks; what failed on this one before it began never was
                self.standing = self._begun.get(self.standing.number - 1, Standing())
                self.end()

    @contextmanager
    def stretch(self) -> Iterator[None]:
        """A part of a call, in which others may wait for this rank; around it the user's own code may run."""
        before = self.standing.state
        if self.is_open:
            self.standing = replace(self.standing, state="inside")
        try:
            yield
        finally:
            if self.is_open:
                self.standing = replace(self.standing, state=before)


def is_of_connections(error: BaseException | None) -> bool:
    """Whether an error only says that another rank cannot be reached."""
    while error is not None:
        if any(words in str(error) for words in _OF_CONNECTIONS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _told(cause: Exception | str) -> str:
    if isinstance(cause, str):
        return cause
    return "" if is_of_connections(cause) else f"{type(cause).__name__}: {cause}"


def left_behind(calls: Calls, peer_rank: int, peer: Standing) -> str | None:
    """Why this rank waits for ever, if a tensor-parallel peer has left a call by an error that was caught there."""
    mine = calls.standing
    if peer.state != "failed" or not peer.cause or calls.has_failed(peer.number):
        return None
    if (mine.number == peer.number and mine.state == "inside") or mine.passed(peer):
        return f"rank {peer_rank}, in {peer.kind}: {peer.cause}\n(caught there, while rank {calls.rank} waited for it)"
    return None


def gone_apart(calls: Calls, peer_rank: int, peer: Standing) -> str | None:
    """What is wrong if another rank of the same copy has begun something else in the place of one of this rank's calls."""
    mine = calls.begun(peer.number)
    if mine is None or mine.trail == peer.trail:
        return None
    at = {calls.rank: mine, peer_rank: peer}
    one, other = (f"rank {rank} is in {at[rank].kind}" for rank in sorted(at))
    return f"{one} while {other}: the ranks of one copy of the model must do the same; did one have fewer batches?"
