"""What every request passes first: the key, the size of its body; and what is noted of it at the end."""

from __future__ import annotations

import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from oslo_engine.serve.faults import BadRequest, Refusal
from oslo_engine.serve.metrics import Metrics
from oslo_engine.serve.settings import ServerSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

logger = logging.getLogger("oslo_engine.serve")
_KNOWN = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/", "/docs", "/openapi.json")


class Gate:
    """ASGI middleware around the whole application.

    Args:
        app: the application.
    """

    def __init__(self, app: Any, settings: ServerSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, request_id = time.monotonic(), uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, note={})
        status, received, over = 500, 0, False

        async def limited_receive() -> Message:
            """The body may also come in pieces without its length being told."""
            nonlocal received, over
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._settings.max_body_bytes:
                over = True
                raise self._too_large()
            return message

        async def noted_send(message: Message) -> None:
            nonlocal status
            if over:  # whatever the application makes of a body that ended like this
                raise self._too_large()
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            await send(message)

        try:
            try:
                self._check(scope)
                await self._app(scope, limited_receive, noted_send)
            except Refusal as refusal:
                over = False
                await _answer(refusal, noted_send)
        finally:
            self._note(scope, status, time.monotonic() - start)

    def _check(self, scope: Scope) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        key = self._settings.api_key
        if key is not None and scope["path"].startswith("/v1/"):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + key.encode()):
                raise Refusal(
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                    status=401,
                    kind="invalid_request_error",
                    code="invalid_api_key",
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> BadRequest:
        return BadRequest(
            f"the body of the request is larger than {self._settings.max_body_bytes} bytes", code="body_too_large", status=413
        )

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in _KNOWN else "other"
        self._metrics.requests.labels(path, str(status)).inc()
        self._metrics.seconds.labels(path).observe(seconds)
        state = scope["state"]
        logger.info(
            "request",
            extra={
                "fields": {
                    "id": state["request_id"],
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "ms": round(seconds * 1000, 1),
                    **state["note"],
                }
            },
        )


async def _answer(refusal: Refusal, send: Send) -> None:
    body = json.dumps(refusal.as_json()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status == 413:
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
