"""A call of a deployed model between its start and its end, as its caller sees it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from oslo_engine.deploy.messages import Prompt
from oslo_engine.errors import UnsupportedError

_END = object()


@dataclass(eq=False)
class Call:
    """One call, with what the dispatcher needs to run it.

    prompt: of a generate call that may run together with others; ``kwargs`` are then its settings.
    key: calls with the same one may run together.
    seed: of torch, before the call. defaults: settings of ``model.generation_config`` that were changed.
    cancel_running: tells the dispatcher; set by it.
    on_token, on_end: called, in the dispatcher's thread, with each new token and once at the end.
    """

    number: int
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    prompt: Prompt | None = None
    key: Hashable | None = None
    seed: int | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    on_token: Callable[[int], None] | None = None
    created: float = field(default_factory=time.monotonic)
    future: Future[Any] = field(default_factory=Future)

    @property
    def rows(self) -> int:
        return 1 if self.prompt is None else self.prompt.ids.shape[0]


class RunningCall:
    """A call that was started and not waited for.

    Args:
        call: it.
        cancel: what ``cancel`` asks the dispatcher.
        tokens: filled by the dispatcher where the call streams.
    """

    def __init__(self, call: Call, cancel: Callable[[Call], None], tokens: queue.SimpleQueue[Any] | None = None) -> None:
        self._call, self._cancel, self._tokens = call, cancel, tokens
        self._loop: Iterator[int] | None = None
        if tokens is not None:
            call.future.add_done_callback(lambda _: tokens.put(_END))

    @property
    def number(self) -> int:
        """The id of the request: unique within the deployed model."""
        return self._call.number

    def result(self, timeout_s: float | None = None) -> Any:
        """What the call returned.

        Raises:
            Exception: what the model raised, with the workers' tracebacks as notes.
            WorkerDied, CallCancelledError: the call has no result.
            TimeoutError: it is not there yet; the call goes on.
        """
        future = self._call.future
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the model's own
                raise
        raise TimeoutError(f"call {self.number} ({self._call.method}) has no result after {timeout_s:g} s; it goes on")

    def done(self) -> bool:
        return self._call.future.done()

    def add_done_callback(self, function: Callable[[], None]) -> None:
        """Have ``function`` called once the call has ended, in a thread of the deployed model."""
        self._call.future.add_done_callback(lambda _: function())

    def cancel(self) -> None:
        """Give the call up: it ends with CallCancelledError, at once where it waits, after the next token where it runs."""
        self._cancel(self._call)

    def __iter__(self) -> Iterator[int]:
        """The new tokens, as they come; after the last, what the call raised. Leaving the loop early cancels the call."""
        return _tokens_of(self._call, self._cancel, self._streamed())

    def __next__(self) -> int:
        """The next token. The call is cancelled where nobody has it any more."""
        if self._loop is None:
            self._loop = _tokens_of(self._call, self._cancel, self._streamed())
        return next(self._loop)

    def _streamed(self) -> queue.SimpleQueue[Any]:
        if self._tokens is None:
            raise UnsupportedError("this call does not stream its tokens", hint="model.stream(...) starts one that does")
        return self._tokens


def _tokens_of(call: Call, cancel: Callable[[Call], None], tokens: queue.SimpleQueue[Any]) -> Iterator[int]:
    try:
        while (token := tokens.get()) is not _END:
            yield token
        tokens.put(_END)  # for whoever asks again
        call.future.result()
    finally:
        cancel(call)  # does nothing once it has ended
