"""The deployed model as its user sees it: it generates and runs forward like a model, and lives in other processes."""

from __future__ import annotations

import atexit
import copy
import itertools
import os
import queue
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from oslo_engine.deploy.batching import as_prompt, batch_key, is_plain
from oslo_engine.deploy.calls import Call, RunningCall
from oslo_engine.deploy.changes import Change, load_changed
from oslo_engine.deploy.dispatcher import Dispatcher
from oslo_engine.deploy.group import WorkerGroup
from oslo_engine.deploy.messages import pack
from oslo_engine.deploy.settings import Deployment, check_seed
from oslo_engine.errors import DeploymentError, NotHereError, UnsupportedError


@dataclass(frozen=True)
class Health:
    """How a deployed model is.

    state: "ready"; "starting" after a death; "failed" when that did not work, until the next call; "closed".
    pids: of the workers by rank. restarts: since it was loaded. waiting, running: calls.
    """

    state: str
    pids: tuple[int, ...]
    restarts: int
    waiting: int
    running: int
    uptime_s: float

    @property
    def ok(self) -> bool:
        return self.state == "ready"


class DeployedModel:
    """A model whose parts are held by workers; this process holds none. Its methods may be called from any thread.

    Use it as a context manager, or call ``close``; the workers also end with this process, however it ends.

    Args:
        load: picklable; called without arguments on every rank, it returns the model.
        num_ranks: workers to start.
        settings: how it takes calls.

    Raises:
        Exception: what a worker raised while it loaded; no worker is left.

    Attributes:
        config: the model's own, to be read: a change has no effect.
        generation_config: the model's own. Its settings, where they are changed here, go along with every call.
    """

    device = torch.device("cpu")  # of what is passed in and comes back

    def __init__(self, load: Callable[[], Any], num_ranks: int, settings: Deployment) -> None:
        if os.environ.get("WERKZEUG_RUN_MAIN") == "true":
            warnings.warn(
                "Flask's reloader runs the script in two processes and both load the model: pass use_reloader=False to app.run",
                stacklevel=4,
            )
        changes: list[Change] = []

        def start(given_up: Callable[[], bool], is_busy: Callable[[], bool]) -> WorkerGroup:
            packed = pack(partial(load_changed, load, tuple(changes)))
            return WorkerGroup.start(packed, num_ranks, settings, given_up, is_busy)

        self._dispatcher, self._changes = Dispatcher(start, settings), changes
        self._traits, self.settings = self._dispatcher.traits, settings
        self.config, self.generation_config = self._traits.config, self._traits.generation_config
        self._defaults_of_workers = _settings_of(copy.deepcopy(self.generation_config))
        self._numbers = itertools.count()
        self._started, self._pid = time.monotonic(), os.getpid()
        self._at_exit = weakref.finalize(self, _close_here, self._dispatcher, self._pid)
        atexit.register(self._at_exit)

    # Calls

    def generate(self, *args: Any, seed: int | None = None, **kwargs: Any) -> Any:
        """Transformers' ``generate`` on the split model.

        Calls from several threads at the same time run together where their settings agree.

        Args:
            args, kwargs: of ``generate``, tensors on any device. What is passed (stopping criteria, ...) must be defined in a
                module that can be imported, not in the script itself.
            seed: of sampling: the tokens are then those of ``torch.manual_seed(seed)`` and the unsplit model. Without it
                every call draws anew, in the workers: torch's seed in this process does not count.

        Returns:
            As the unsplit model, on the CPU; caches in the output are None.
        """
        return self.start_generate(*args, seed=seed, **kwargs).result()

    def start_generate(self, *args: Any, seed: int | None = None, **kwargs: Any) -> RunningCall:
        """As ``generate``, without waiting."""
        return self._start(self._generate_call(args, kwargs, seed))

    def stream(self, input_ids: Tensor, *, seed: int | None = None, **kwargs: Any) -> RunningCall:
        """Generate from one prompt of shape [1, length], and iterate over the new tokens as they come.

        Leaving the loop early, or ``cancel()`` of what is returned, ends the call.
        """
        tokens: queue.SimpleQueue[Any] = queue.SimpleQueue()
        return self._start(self._streaming_call(input_ids, tokens.put, seed=seed, **kwargs), tokens)

    def stream_to(self, on_token: Callable[[int], None], input_ids: Tensor, **kwargs: Any) -> RunningCall:
        """As ``stream``, with a function that is called with every new token, in a thread of the deployed model."""
        return self._start(self._streaming_call(input_ids, on_token, **kwargs))

    def _streaming_call(
        self, input_ids: Tensor, on_token: Callable[[int], None], *, seed: int | None = None, **kwargs: Any
    ) -> Call:
        call = self._generate_call((input_ids,), kwargs, seed, on_token)
        if call.prompt is None or call.prompt.ids.shape[0] != 1:
            raise UnsupportedError(
                "this call cannot be streamed",
                expected="input_ids of shape [1, length], no beams, one returned sequence, and settings as plain arguments",
                got=f"{tuple(input_ids.shape)}, {', '.join(sorted(kwargs))}",
            )
        return call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without gradients and without a cache; under pipeline parallelism too one call."""
        if kwargs.get("use_cache"):
            raise UnsupportedError(
                "the cache of a deployed model stays with its workers",
                got="use_cache=True",
                hint="call generate, or leave it out",
            )
        if getattr(self.config, "use_cache", None):
            kwargs["use_cache"] = False
        return self.call("forward", *args, **kwargs)

    __call__ = forward

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method of the model on all workers, or read an attribute.

        What it changes in the workers is lost where these are started anew; ``fuse`` and ``unfuse`` are repeated then.

        Returns:
            What rank 0's returned; None in the place of caches, and where a method returns the model itself.

        Raises:
            DeploymentError: it returned modules, or something else that stays with the workers.
        """
        return self._start(self._method_call(method, args, kwargs)).result()

    def fuse(self, targets: Any = None) -> DeployedModel:
        """Let kernels compute what they can, on all workers, also on those that are started later; see ``model.fuse``."""
        self.call("fuse", targets)
        return self

    def unfuse(self) -> DeployedModel:
        """Take back what ``fuse`` did."""
        self.call("unfuse")
        return self

    @property
    def fusion_report(self) -> Any:
        """Of the last ``fuse``, as rank 0 has it; None while nothing is fused."""
        return self.call("fusion_report")

    # As a model has it

    @property
    def dtype(self) -> torch.dtype:
        return self._traits.dtype

    def can_generate(self) -> bool:
        return self._traits.can_generate

    @property
    def input_modalities(self) -> Any:
        """Of the model, for Transformers' ``pipeline``."""
        return self._traits.modalities[0]

    @property
    def output_modalities(self) -> Any:
        return self._traits.modalities[1]

    def eval(self) -> DeployedModel:
        """A deployed model is in evaluation mode. Returns the model."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotHereError(
            "a deployed model has no such attribute in this process",
            where=f"{type(self).__name__}.{name}",
            got="its modules and weights lie with the workers, in evaluation mode",
            hint="model.call(name, ...) calls a method there; to train, move or copy a model, load it without deployment",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DeploymentError(
            "a deployed model cannot be copied, pickled or sent to another process",
            got="it is a connection to workers of this process",
            hint="hand the model itself to threads; another process loads its own",
        )

    # Its life

    def health(self) -> Health:
        self._check_process()
        told = self._dispatcher
        return Health(
            told.state, told.pids, told.restarts, told.num_waiting, told.num_running, time.monotonic() - self._started
        )

    def close(self) -> None:
        """End the workers. Calls that run or wait fail. Can be called again."""
        self._check_process()
        self._dispatcher.close()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> DeployedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _method_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = Call(next(self._numbers), method, _on_cpu(args), _on_cpu(kwargs), defaults=self._changed_defaults())
        if method in ("fuse", "unfuse"):
            # In the thread that also starts workers anew: between the two nothing can be forgotten.
            call.future.add_done_callback(lambda future: None if _failed(future) else self._remember(call))
        return call

    def _remember(self, call: Call) -> None:
        kept = [] if call.method == "unfuse" else [*self._changes, Change(call.method, call.args, call.kwargs)]
        self._changes[:] = kept

    def _generate_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None, on_token: Callable[[int], None] | None = None
    ) -> Call:
        check_seed(seed)
        args, kwargs = _on_cpu(args), _on_cpu(kwargs)
        number, defaults = next(self._numbers), self._changed_defaults()
        traits = replace(self._traits, generation_config=self.generation_config)
        found = as_prompt(args, kwargs, traits, streams=on_token is not None)
        if found is None:
            return Call(number, "generate", args, kwargs, seed=seed, defaults=defaults)
        prompt, settings = found
        key = None if seed is not None else batch_key(prompt, settings, traits)
        if key is not None and defaults:
            key = (key, repr(sorted(defaults.items()))) if all(map(is_plain, defaults.values())) else None
        return Call(number, "generate", (), settings, prompt, key, seed, defaults, on_token)

    def _changed_defaults(self) -> dict[str, Any]:
        """Settings of ``generation_config`` that are not what the workers have."""
        now, theirs = _settings_of(self.generation_config), self._defaults_of_workers
        changed = {name: value for name, value in now.items() if name not in theirs or not _same(theirs[name], value)}
        return {**{name: None for name in theirs if name not in now}, **changed}

    def _start(self, call: Call, tokens: queue.SimpleQueue[Any] | None = None) -> RunningCall:
        self._check_process()
        running = RunningCall(call, self._dispatcher.cancel, tokens)
        self._dispatcher.submit(call)
        return running

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise DeploymentError(
                "a deployed model was used in another process than the one that loaded it",
                expected=f"process {self._pid}",
                got=f"process {os.getpid()}",
                hint="load it after the web server has forked its own workers (gunicorn without --preload)",
            )


def _settings_of(generation_config: Any) -> dict[str, Any]:
    own = {} if generation_config is None else vars(generation_config)
    return {name: value for name, value in own.items() if not name.startswith("_") and name != "transformers_version"}


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other))


def _failed(future: Future[Any]) -> bool:
    return future.cancelled() or future.exception() is not None


def _on_cpu(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)


def _close_here(dispatcher: Dispatcher, pid: int) -> None:
    if os.getpid() == pid:
        dispatcher.close()
