"""How many bytes of tensors are alive, and the most there were, in each part of a step.

Works on real and on fake tensors alike: what counts is the storage that an operation returns, until nobody holds it any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[Any, Any, Any], Any]
Traffic = dict[str, tuple[int, int]]  # kind of collective -> (calls, bytes handed in)


@dataclass
class Segment:
    """A stretch of a step.

    label: what ran. kept: bytes that are alive at its end and were not at its start (negative: freed).
    peak: the most that was alive in it, above its start.
    traffic: collectives in it.
    """

    label: tuple[str, str]
    kept: int = 0
    peak: int = 0
    traffic: Traffic = field(default_factory=dict)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class LiveBytes(TorchDispatchMode):
    """Counts while it is on; tensors that were there before count once an operation returns them, unless ``leave_out``.

    Args:
        run: computes an operation, of its arguments by position and by name.
    """

    def __init__(self, run: Run = _run) -> None:
        super().__init__()
        self._run = run
        self.alive = 0
        self.segments: list[Segment] = []
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._start = 0
        self._most = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch puts a guard against compilation around every dispatch, which costs more than what is counted here."""
        return False

    @property
    def most(self) -> int:
        """The most that was alive at any time."""
        level = most = 0
        for segment in self.segments:
            most = max(most, level + segment.peak)
            level += segment.kept
        return max(most, level + self._most - self._start)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Never count these: weights, gradients, the batch."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._remember(storage, storage._cdata, 0)

    def begin(self, label: tuple[str, str]) -> None:
        """End the segment before, and start one."""
        self.end()
        self.segments.append(Segment(label))

    def end(self) -> None:
        if self.segments:
            last = self.segments[-1]
            last.kept, last.peak = self.alive - self._start, self._most - self._start
        self._start = self._most = self.alive

    def note_collective(self, kind: str, size_bytes: int) -> None:
        calls, size = self.segments[-1].traffic.get(kind, (0, 0))
        self.segments[-1].traffic[kind] = (calls + 1, size + size_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._run(func, args, kwargs or {})
        if isinstance(out, Tensor):
            self._count(out)
        elif isinstance(out, (list, tuple)):
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._count(leaf)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._remember(storage, key, storage.nbytes())
        self.alive += storage.nbytes()
        self._most = max(self._most, self.alive)

    def _remember(self, storage: Any, key: int, size: int) -> None:
        """Until it is gone: another one may then get the same address."""
        self._sizes[key] = size
        self._watched[key] = weakref.ref(storage, lambda _: self._drop(key))

    def _drop(self, key: int) -> None:
        del self._watched[key]
        self.alive -= self._sizes.pop(key, 0)
