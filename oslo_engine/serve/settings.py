"""What a server allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """name: of the model, as clients ask for it.

    api_key: what clients must send as ``Authorization: Bearer ...``; None lets everybody in.
    max_body_bytes: of a request. max_new_tokens: the most that one choice may ask for.
    max_choices: prompts times ``n`` of one request.
    shutdown_s: how long requests may go on after the server was told to end.
    """

    name: str
    api_key: str | None = None
    max_body_bytes: int = 2 * 1024 * 1024
    max_new_tokens: int = 2048
    max_choices: int = 32
    shutdown_s: int = 30
