"""Running the server: its socket, its log, and a shutdown that lets requests end."""

from __future__ import annotations

import json
import logging
import socket
import sys
import time
from typing import Any

from oslo_engine.errors import DeploymentError
from oslo_engine.serve.metrics import missing
from oslo_engine.serve.settings import ServerSettings


class JsonLines(logging.Formatter):
    """Every record as one line of JSON; ``extra={"fields": {...}}`` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_in_lines(level: str) -> None:
    """Send what the server and uvicorn log to stderr, a line of JSON each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("oslo_engine.serve", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn.error").handlers = []
    logging.getLogger("uvicorn.error").propagate = True


def bind(host: str, port: int) -> socket.socket:
    """The server's socket, before the model is loaded: a port that is taken shows at once.

    Raises:
        DeploymentError: it is taken, or not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        raise DeploymentError(
            "the server cannot listen there",
            where=f"{host}:{port}",
            got=error.strerror,
            hint="choose another --port; 0 takes a free one",
        ) from None
    return taken


def run_server(app: Any, listening: socket.socket, settings: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM; requests that run then may end within ``settings.shutdown_s``."""
    try:
        import uvicorn
    except ImportError:
        raise missing("uvicorn") from None
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=settings.shutdown_s)
    host, port = listening.getsockname()[:2]
    logging.getLogger("oslo_engine.serve").info("listening", extra={"fields": {"host": host, "port": port}})
    uvicorn.Server(config).run(sockets=[listening])
