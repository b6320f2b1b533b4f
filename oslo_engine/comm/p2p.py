"""Point-to-point messages between the ranks of one pipeline.

Three process groups carry them: activations (``forward``) and gradients (``backward``) run on the device's backend, each in a
group of its own, and small things known on the host (headers, losses, outcomes) on ``control``, which is always gloo. Values of
one direction are matched by their order only, so that backends without tags work; control messages have tags.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_engine.comm.collectives import Axis
from oslo_engine.errors import PipelineError

Direction = Literal["forward", "backward"]
_HEADER_TAG, _LOSS_TAG = 1, 2
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@dataclass(frozen=True)
class TensorMeta:
    """What must be known to receive a tensor, and whether its sender wants a gradient back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


@dataclass
class Traffic:
    """What was sent to one rank in one group."""

    messages: int = 0
    bytes: int = 0

    def count(self, tensor: Tensor) -> None:
        self.messages += 1
        self.bytes += tensor.numel() * tensor.element_size()


@dataclass
class Incoming:
    """Tensors on their way here; ``wait`` returns them when they are complete."""

    tensors: tuple[Tensor, ...]
    peer: int
    _works: list[Any]
    _links: PipelineLinks

    def wait(self) -> tuple[Tensor, ...]:
        with self._links.watched(f"receiving values from pp rank {self.peer}"):
            for work in self._works:
                work.wait()
        self._works = []
        return self.tensors


@dataclass(frozen=True)
class Outcome:
    """How a batch went.

    problems: why ranks stopped in the middle of it, by pp rank.
    fingerprints: of the batch each rank was given.
    """

    problems: dict[int, str]
    fingerprints: tuple[int, ...]


@dataclass
class PipelineLinks:
    """This rank's connections to the others of its pipeline. Peers are pp ranks.

    forward, backward, control: process groups over the pp axis; None where it has size 1.
    traffic: what was sent, by (group name, peer).
    failure: the error after which these groups cannot be used any more.
    bounded: whether a send waits where many before it have not been received. Where several runs take turns it must not: the
        receiver may first meet this rank at the end of another run.
    """

    axis: Axis
    forward: Any = None
    backward: Any = None
    control: Any = None
    traffic: dict[tuple[str, int], Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    failure: PipelineError | None = None
    bounded: bool = True
    _pending: dict[tuple[Direction, int], deque[tuple[Any, Tensor]]] = field(default_factory=lambda: defaultdict(deque))
    _pending_control: list[tuple[Any, Tensor]] = field(default_factory=list)

    @classmethod
    def create(cls, pp_groups: Sequence[Sequence[int]], timeout: timedelta) -> PipelineLinks:
        """Make the groups of all pipelines and return the links of the one this rank is in.

        Args:
            pp_groups: global ranks of every pipeline, ascending; the same on every rank.
            timeout: how long a message may be waited for. Process groups made here do not inherit the default group's.

        Communication: collective over the world (``dist.new_group``), three groups per pipeline.
        """
        mine: PipelineLinks | None = None
        for ranks in pp_groups:
            assert list(ranks) == sorted(ranks), "process groups number their ranks in ascending order"
            if len(ranks) > 1:
                forward, backward = (dist.new_group(list(ranks), timeout=timeout) for _ in range(2))
                control = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            else:
                forward = backward = control = None
            if dist.get_rank() in ranks:
                axis = Axis("pp", len(ranks), list(ranks).index(dist.get_rank()), forward)
                mine = cls(axis, forward, backward, control)
        assert mine is not None, "every rank is in one pipeline"
        return mine

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineLinks:
        return self  # process groups cannot be copied

    # Values

    def send(self, direction: Direction, tensors: Sequence[Tensor], peer: int) -> None:
        """Start sending; the tensors must not be written to until ``wait_for_sends``.

        At most ``2 * pp`` earlier sends to a peer stay unfinished (if ``bounded``); more are waited for: a slow receiver costs
        no memory.
        """
        pending = self._pending[direction, peer]
        with self.watched(f"sending values to pp rank {peer}"):
            for tensor in tensors:
                data = _as_bytes(tensor.detach().contiguous())
                if data.numel():
                    work = dist.isend(data, group=getattr(self, direction), group_dst=peer)
                    self.traffic[direction, peer].count(data)
                    pending.append((work, data))
            while self.bounded and len(pending) > 2 * self.axis.size * max(1, len(tensors)):
                pending.popleft()[0].wait()

    def receive(self, direction: Direction, metas: Sequence[TensorMeta], peer: int, device: torch.device) -> Incoming:
        """Start receiving tensors that a peer sends with ``send``."""
        tensors = tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in metas)
        with self.watched(f"receiving values from pp rank {peer}"):
            group = getattr(self, direction)
            works = [dist.irecv(_as_bytes(tensor), group=group, group_src=peer) for tensor in tensors if tensor.numel()]
        return Incoming(tensors, peer, works, self)

    def wait_for_sends(self) -> None:
        with self.watched("waiting until everything that was sent has been received"):
            for pending in (*self._pending.values(), self._pending_control):
                for work, _ in pending:
                    work.wait()
                pending.clear()

    def take_sends(self) -> list[tuple[Any, Tensor]]:
        """The sends that are not waited for yet, for the caller to do so; they and their data must be kept until then."""
        taken = [one for pending in (*self._pending.values(), self._pending_control) for one in pending]
        for pending in (*self._pending.values(), self._pending_control):
            pending.clear()
        return taken

    # Headers and losses

    def send_header(self, metas: Sequence[TensorMeta] | None, mark: tuple[int, ...], peer: int) -> None:
        """Announce the values that follow, or with None that there are none. ``mark`` is what the receiver must expect."""
        numbers = [*mark, -1 if metas is None else len(metas)]
        for meta in metas or ():
            numbers += [_DTYPES.index(meta.dtype), int(meta.requires_grad), len(meta.shape), *meta.shape]
        self._send_control(torch.tensor([len(numbers)]), peer, _HEADER_TAG)
        self._send_control(torch.tensor(numbers), peer, _HEADER_TAG)

    def receive_header(self, mark: tuple[int, ...], peer: int) -> tuple[TensorMeta, ...] | None:
        length = self._receive_control(torch.empty(1, dtype=torch.int64), peer, _HEADER_TAG)
        numbers = self._receive_control(torch.empty(int(length), dtype=torch.int64), peer, _HEADER_TAG).tolist()
        self._check_mark(tuple(numbers[: len(mark)]), mark, peer)
        count, rest = numbers[len(mark)], iter(numbers[len(mark) + 1 :])
        if count < 0:
            return None
        metas = []
        for dtype, requires_grad, num_dims in (([next(rest) for _ in range(3)]) for _ in range(count)):
            metas.append(TensorMeta(tuple(next(rest) for _ in range(num_dims)), _DTYPES[dtype], bool(requires_grad)))
        return tuple(metas)

    def send_loss(self, loss: Tensor | None, mark: tuple[int, ...]) -> None:
        """Tell every other rank a scalar loss, or with None that there is none."""
        known = [0.0, 0.0, 0.0] if loss is None else [1.0, float(_DTYPES.index(loss.dtype)), float(loss)]
        message = torch.tensor([*mark, *known], dtype=torch.float64)
        for peer in range(self.axis.size):
            if peer != self.axis.rank:
                self._send_control(message, peer, _LOSS_TAG)

    def receive_loss(self, mark: tuple[int, ...], peer: int) -> Tensor | None:
        message = self._receive_control(torch.empty(len(mark) + 3, dtype=torch.float64), peer, _LOSS_TAG)
        *found, known, dtype, value = message.tolist()
        self._check_mark(tuple(int(number) for number in found), mark, peer)
        return torch.tensor(value, dtype=_DTYPES[int(dtype)]) if known else None

    def agree(self, mark: int, fingerprint: int, problem: str | None) -> Outcome:
        """Exchange how a batch went.

        Communication: one all-gather of three numbers on ``control``, and one of the texts if there are any.
        """
        if self.axis.size == 1:
            return Outcome({} if problem is None else {0: problem}, (fingerprint,))
        with self.watched("waiting for the other stages at the end of a batch"):
            mine = torch.tensor([mark, fingerprint, int(problem is not None)])
            gathered = [torch.empty_like(mine) for _ in range(self.axis.size)]
            dist.all_gather(gathered, mine, group=self.control)
            marks, fingerprints, failed = zip(*(theirs.tolist() for theirs in gathered), strict=True)
            texts: list[str | None] = [None] * self.axis.size
            if any(failed):
                dist.all_gather_object(texts, problem, group=self.control)
        for peer, found in enumerate(marks):
            self._check_mark((found,), (mark,), peer)
        return Outcome({peer: text for peer, text in enumerate(texts) if text is not None}, fingerprints)

    def give_up(self, reason: str) -> None:
        """Refuse all further work: messages may be on their way that nobody will receive."""
        self.failure = self.failure or self._failed("a pipeline rank left without telling the others", "a batch", None, reason)

    def _send_control(self, message: Tensor, peer: int, tag: int) -> None:
        with self.watched(f"sending to pp rank {peer}"):
            self._pending_control.append((dist.isend(message, group=self.control, group_dst=peer, tag=tag), message))
            self.traffic["control", peer].count(message)

    def _receive_control(self, message: Tensor, peer: int, tag: int) -> Tensor:
        with self.watched(f"waiting for a message from pp rank {peer}"):
            work: Any = dist.irecv(message, group=self.control, group_src=peer, tag=tag)
            work.wait()
        return message

    def _check_mark(self, found: tuple[int, ...], expected: tuple[int, ...], peer: int) -> None:
        if found != expected:
            what, where = "the ranks of a pipeline are not in the same batch", f"a message from pp rank {peer}"
            self.failure = self._failed(what, where, f"batch, ..., micro-batch {expected}", f"{found}")
            raise self.failure

    @contextmanager
    def watched(self, doing: str) -> Iterator[None]:
        """Turn a failure of the backend into one error of ours, after which the links refuse to work."""
        if self.failure is not None:
            raise self.failure
        try:
            yield
        except PipelineError:
            raise
        except RuntimeError as error:
            got = str(error).splitlines()[0]
            self.failure = self._failed("a pipeline rank does not answer", doing, "a message within the timeout", got)
            raise self.failure from error

    def _failed(self, what: str, where: str, expected: str | None, got: str) -> PipelineError:
        return PipelineError(
            what,
            where=f"pp rank {self.axis.rank}, {where}",
            expected=expected,
            got=got,
            hint="all ranks must run the same loop over the same batch; look for the first error on the others, then restart",
        )


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, so that every dtype travels on every backend."""
    return tensor.view(-1).view(torch.uint8)
