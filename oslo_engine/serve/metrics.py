"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from oslo_engine.errors import MissingDependencyError


class Metrics:
    """Counters of one server. ``health``: asked whenever the numbers are read."""

    def __init__(self, health: Callable[[], Any]) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError:
            raise missing("prometheus_client") from None
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self.requests = Counter("oslo_requests", "Requests by path and status", ["path", "status"], **own)
        self.seconds = Histogram("oslo_request_seconds", "From the request to the end of the answer", ["path"], **own)
        self.first_token_seconds = Histogram("oslo_first_token_seconds", "From the request to its first text", **own)
        self.prompt_tokens = Counter("oslo_prompt_tokens", "Tokens of prompts", **own)
        self.new_tokens = Counter("oslo_new_tokens", "Tokens generated", **own)
        for name, what in {
            "waiting": "Calls that wait for the model",
            "running": "Calls that run together just now",
            "restarts": "How often the workers were started anew",
        }.items():
            Gauge(f"oslo_{name}", what, **own).set_function(partial(_read, health, attrgetter(name)))
        Gauge("oslo_ready", "1 if the workers are ready", **own).set_function(lambda: float(health().ok))

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


def _read(health: Callable[[], Any], what: Callable[[Any], Any]) -> float:
    return float(what(health()))


def missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"the server needs the package {package}", got="it is not installed", hint="pip install 'oslo-engine[serve]'"
    )
