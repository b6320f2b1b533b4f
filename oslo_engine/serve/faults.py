"""What goes wrong with a request, as the client is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oslo_engine.errors import CallCancelledError, DeploymentError, OsloError, QueueFullError


class Refusal(Exception):
    """An answer with an error.

    Args:
        message: for the person who sent the request.
        status: of HTTP.
        kind, param, code: as OpenAI's API has them.
    """

    def __init__(self, message: str, *, status: int, kind: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    def as_json(self) -> dict[str, object]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class BadRequest(Refusal):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message, status=status, kind="invalid_request_error", param=param, code=code)


def wrong_form(faults: Sequence[Any], body: Any, content_type: str) -> BadRequest:
    """For a body that is none of the requests.

    Args:
        faults: what pydantic found. body: as far as it was read. content_type: of the request.
    """
    # Of several forms that a value may have, the one it comes close to.
    fault = max(faults, key=lambda one: len(_path(one, body)))
    kind, where = fault["type"], fault["loc"][1:]
    if kind == "json_invalid":
        return BadRequest(f"the body is no JSON: {fault['ctx']['error']} at character {where[0] if where else 0}")
    if not where:
        if body in (None, b"", ""):
            return BadRequest("the request has no body; it must be a JSON object")
        if "json" not in content_type:
            came = f"as {content_type}" if content_type else "without a type"
            return BadRequest(f"the body must be sent as Content-Type: application/json; it came {came}")
        return BadRequest("the body must be a JSON object")
    param = ".".join(_path(fault, body))
    message = {
        "missing": "is missing",
        "extra_forbidden": "this server knows no such field",
        "finite_number": "must be a finite number, and JSON has no other",
    }.get(kind, fault["msg"].removeprefix("Value error, "))
    return BadRequest(_printable(f"{param}: {message}" if param else message), param=_printable(param))


def _path(fault: Any, body: Any) -> list[str]:
    """Keys and numbers that lead through the body; pydantic puts names of its own types between them."""
    where, steps = fault["loc"][1:], []
    for step in where:
        is_key = isinstance(body, dict) and (step in body or (fault["type"] == "missing" and step == where[-1]))
        if is_key or (isinstance(body, list) and isinstance(step, int) and step < len(body)):
            steps.append(str(step))
            body = body[step] if not isinstance(body, dict) else body.get(step)
    return steps


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()


def refusal_of(error: BaseException) -> Refusal:
    """For what a call of the deployed model raised."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, QueueFullError):
        return Refusal(error.what, status=429, kind="rate_limit_error", code="queue_full")
    if isinstance(error, CallCancelledError):
        return Refusal(error.what, status=503, kind="server_error", code="cancelled")
    if isinstance(error, DeploymentError):  # a worker that died among them: the next request finds new ones
        return Refusal(error.what, status=503, kind="server_error", code="model_unavailable")
    what = error.what if isinstance(error, OsloError) else f"{type(error).__name__}"
    return Refusal(f"the model failed: {what}", status=500, kind="server_error", code="model_failed")
