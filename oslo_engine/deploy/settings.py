"""How a deployed model takes calls."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from oslo_engine.errors import DeploymentError

_SEEDS = range(-(2**63), 2**64)  # of torch


@dataclass(frozen=True)
class Deployment:
    """For ``from_pretrained_with_parallel(..., deployment=Deployment(...))``; ``deployment=True`` takes the defaults.

    max_queue: calls that may wait; one more is refused with QueueFullError.
    max_batch_rows: rows of the generate calls that are run together.
    batch_window_ms: how long the first of several generate calls waits for others to come. Each that comes begins it anew, up
        to four times this long in all.
    start_timeout_s: how long the workers may take to load the model.
    silence_timeout_s: after which a worker that shows no life (stopped, swapped out) is ended, and the others with it.
    stall_timeout_s: after which workers that run a call, but neither compute nor communicate, are ended: a deadlock.
    threads_per_worker: of torch; by default the machine's cores are shared out.
    """

    max_queue: int = 256
    max_batch_rows: int = 32
    batch_window_ms: float = 3.0
    start_timeout_s: float = 600.0
    silence_timeout_s: float = 20.0
    stall_timeout_s: float = 120.0
    threads_per_worker: int | None = None

    def __post_init__(self) -> None:
        least = {
            "max_queue": 1,
            "max_batch_rows": 1,
            "batch_window_ms": 0,
            "start_timeout_s": 0,
            "silence_timeout_s": 2,
            "stall_timeout_s": 2,
            "threads_per_worker": 1,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise DeploymentError("a deployment setting is too small", where=name, expected=f">= {minimum}", got=value)


def check_seed(seed: Any) -> None:
    """Raises:
    DeploymentError: it is no seed for torch.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral) or int(seed) not in _SEEDS):
        raise DeploymentError("this is no seed", expected="an integer from -2**63 to 2**64 - 1, or None", got=repr(seed))
