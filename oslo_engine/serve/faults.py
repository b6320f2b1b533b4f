"""What goes wrong with a request, as the client is told."""

from __future__ import annotations

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
