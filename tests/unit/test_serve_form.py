"""What the server says of requests that have not the form of any, and which fields they may leave out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from served_model import save_small_model


class Deployed:
    """Answers every call with one token, and keeps the settings."""

    config = SimpleNamespace(max_position_embeddings=128)
    settings = SimpleNamespace(max_queue=6)
    generation_config = SimpleNamespace(eos_token_id=0)

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def health(self) -> Any:
        return SimpleNamespace(state="ready", pids=(), restarts=0, waiting=0, running=0, uptime_s=0.0, ok=True)

    def stream_to(self, on_token: Any, ids: Any, **settings: Any) -> Any:
        self.asked.append(settings)
        on_token(5)
        return SimpleNamespace(add_done_callback=lambda done: done(), result=lambda: None, cancel=lambda: None)


@pytest.fixture(scope="module")
def deployed() -> Deployed:
    return Deployed()


@pytest.fixture(scope="module")
def client(deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from fastapi.testclient import TestClient
    from transformers import AutoTokenizer

    from oslo_engine.serve.app import build_app
    from oslo_engine.serve.settings import ServerSettings

    folder: Path = tmp_path_factory.mktemp("small")
    save_small_model(folder)
    return TestClient(build_app(deployed, AutoTokenizer.from_pretrained(folder), ServerSettings("small")))


def complaint(client: Any, content: str, path: str = "/v1/completions", kind: str = "application/json") -> tuple[str, str]:
    answer = client.post(path, content=content, headers={"Content-Type": kind})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error["param"]


@pytest.mark.parametrize(
    ("change", "told", "param"),
    [
        ({"prompt": []}, "prompt: must not be an empty list", "prompt"),
        ({"prompt": [[]]}, "prompt: must have at least one token", "prompt"),
        ({"prompt": [5, -1]}, "prompt: -1 is no token id", "prompt"),
        ({"prompt": [[5], [-1]]}, "prompt: -1 is no token id", "prompt"),
        ({"prompt": [5, "a"]}, "texts only, or token ids", "prompt"),
        ({"prompt": None}, "prompt: must be a text", "prompt"),
        ({"prompt": "\ud800"}, "half of a surrogate pair", "prompt"),
        ({"stop": list("abcde")}, "stop: at most 4 stop texts, not 5", "stop"),
        ({"stop": [5]}, "stop: must be a text or a list of texts", "stop"),
        ({"user": 5}, "user: Input should be a valid string", "user"),
        ({"nonsense": 5}, "nonsense: this server knows no such field", "nonsense"),
        ({"stream_options": {"x": 5}}, "this server knows no such field", "stream_options.x"),
        ({"n": 7}, "7 choices never fit into the server's queue of 6", "n"),
        ({"n": 33}, "at most 32 choices", "n"),
    ],
)
def test_a_wrong_field_is_told_of_by_its_name(client: Any, change: dict[str, Any], told: str, param: str) -> None:
    message, named = complaint(client, json.dumps({"model": "small", "prompt": "fox", **change}))
    assert told in message
    assert "function-" not in message
    assert named == param


@pytest.mark.parametrize(
    ("content", "kind", "told"),
    [
        ("{", "application/json", "the body is no JSON"),
        ("", "application/json", "the request has no body"),
        ("[]", "application/json", "must be a JSON object"),
        ('{"model": "small", "prompt": "x", "n": NaN}', "application/json", "n: must be a finite number"),
        ('{"model": "small", "prompt": "x"}', "text/plain", "application/json; it came as text/plain"),
        ('{"prompt": "x"}', "application/json", "model: is missing"),
    ],
)
def test_a_body_that_is_no_request_is_told_of(client: Any, content: str, kind: str, told: str) -> None:
    assert told in complaint(client, content, kind=kind)[0]


@pytest.mark.parametrize(
    ("content", "told", "param"),
    [
        ([{"type": "image_url", "image_url": {}}], "a part of type 'image_url' cannot be read", "messages.0.content"),
        ([{"type": "text"}], "is missing", "messages.0.content.0.text"),
        (5, "must be a text, or a list of parts", "messages.0.content"),
    ],
)
def test_a_message_that_is_no_text_is_told_of(client: Any, content: Any, told: str, param: str) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": content}]}
    message, named = complaint(client, json.dumps(body), path="/v1/chat/completions")
    assert told in message
    assert named == param


def test_two_limits_must_not_differ(client: Any) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "max_completion_tokens": 3}
    assert "say different things" in complaint(client, json.dumps(body), path="/v1/chat/completions")[0]
    body["max_completion_tokens"] = 4
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_what_may_be_left_out_may_be_null(client: Any, deployed: Deployed) -> None:
    fields = ("temperature", "top_p", "top_k", "repetition_penalty", "n", "seed", "stop", "stream", "stream_options", "user")
    asked = {"model": "small", "prompt": "fox"}
    for body in (asked, {**asked, **dict.fromkeys((*fields, "max_tokens", "echo", "logprobs"))}):
        assert client.post("/v1/completions", json=body).status_code == 200
    without, with_nulls = ({name: str(value) for name, value in one.items()} for one in deployed.asked[-2:])
    assert without == with_nulls
