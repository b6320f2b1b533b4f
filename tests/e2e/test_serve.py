"""``oslo-engine serve``: the real server with a small model, spoken to by OpenAI's own client and by clients that misbehave."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoTokenizer

from deployed_model import wait_until_gone
from served_model import Served, save_small_model, served

KEY = "the key"
PROMPT = "The quick brown"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small")


@pytest.fixture(scope="module")
def unsplit(folder: Path) -> Any:
    return save_small_model(folder)


@pytest.fixture(scope="module")
def server(folder: Path, unsplit: Any) -> Iterator[Served]:
    options = (
        "--tp",
        "2",
        "--name",
        "small",
        "--api-key",
        KEY,
        "--max-body-bytes",
        "100000",
        "--max-new-tokens",
        "100",
        "--max-queue",
        "24",
    )
    with served(folder, *options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def text_of_unsplit(folder: Path, unsplit: Any, prompt: str, new: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    output = unsplit.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_completions_are_the_unsplit_model_s(client: openai.OpenAI, folder: Path, unsplit: Any) -> None:
    prompts = [PROMPT, "Pack my", "0123"]
    wanted = [text_of_unsplit(folder, unsplit, prompt, 12) for prompt in prompts]
    answer = client.completions.create(model="small", prompt=prompts, max_tokens=12, temperature=0)
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 36
    streamed = ["", "", ""]
    for event in client.completions.create(model="small", prompt=prompts, max_tokens=12, temperature=0, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == wanted


def test_chat_is_the_unsplit_model_s(client: openai.OpenAI, folder: Path, unsplit: Any) -> None:
    messages: Any = [
        {"role": "user", "content": "five"},
        {"role": "assistant", "content": "dozen"},
        {"role": "user", "content": "x"},
    ]
    wanted = text_of_unsplit(folder, unsplit, "<user>five<assistant>dozen<user>x", 10)
    asked: dict[str, Any] = {"model": "small", "messages": messages, "max_tokens": 10, "temperature": 0}
    assert client.chat.completions.create(**asked).choices[0].message.content == wanted
    events = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == wanted
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == 10


def test_a_seed_repeats_a_sample_and_choices_differ(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": PROMPT, "max_tokens": 20, "n": 2, "seed": 3}
    first, second = client.completions.create(**asked), client.completions.create(**asked)
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert first.choices[0].text != first.choices[1].text


def test_a_stop_text_ends_a_choice(client: openai.OpenAI, folder: Path, unsplit: Any) -> None:
    whole = text_of_unsplit(folder, unsplit, PROMPT, 40)
    stop = whole[8:10]
    answer = client.completions.create(
        model="small", prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop], extra_body={"echo": True}
    )
    assert answer.choices[0].text == PROMPT + whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "oslo-engine"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("large")


def refused(server: Served, **body: Any) -> tuple[int, str]:
    return _refused(server, json.dumps(body).encode())


def _refused(server: Served, content: bytes, path: str = "/v1/completions", key: str = KEY) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    answer = httpx.post(server.url + path, content=content, headers=headers, timeout=60)
    return answer.status_code, answer.json()["error"]["message"]


ASK: dict[str, Any] = {"model": "small", "prompt": PROMPT}


@pytest.mark.parametrize(
    ("change", "status", "complaint"),
    [
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 101}, 400, "at most 100 tokens"),
        ({"prompt": "fox " * 300}, 400, "do not fit into the model's 128"),
        ({"prompt": ""}, 400, "no tokens"),
        ({"prompt": [5, 100000]}, 400, "not in the vocabulary"),
        ({"prompt": []}, 400, "prompt: must not be an empty list"),
        ({"prompt": [[]]}, 400, "prompt: must have at least one token"),
        ({"prompt": [5, -1]}, 400, "prompt: -1 is no token id"),
        ({"prompt": ["a", 5]}, 400, "texts only, or token ids"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop: at most 4 stop texts, not 5"),
        ({"user": 5}, 400, "user: Input should be a valid string"),
        ({"stream_options": {"x": 1}}, 400, "stream_options.x: this server knows no such field"),
        ({"n": 25}, 400, "25 choices never fit into the server's queue of 24"),
        ({"prompt": "\ud800"}, 400, "prompt"),
        ({"temperature": 3}, 400, "temperature"),
        ({"temperature": float("nan")}, 400, "temperature"),
        ({"nonsense": 1}, 400, "nonsense"),
        ({"n": 33}, 400, "at most 32 choices"),
        ({"model": "large"}, 404, "no model 'large'"),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(
    server: Served, change: dict[str, Any], status: int, complaint: str
) -> None:
    got, message = refused(server, **{**ASK, **change})
    assert got == status
    assert complaint in message


def test_requests_without_form_are_told_why(server: Served) -> None:
    for content, complaint in {
        b"{wrong": "the body is no JSON",
        b"": "the request has no body",
        b"[]": "must be a JSON object",
        b'{"model": "small", "prompt": "x", "temperature": NaN}': "temperature: must be a finite number",
    }.items():
        status, message = _refused(server, content)
        assert (status, complaint in message) == (400, True), message
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "text/plain"}
    plain = httpx.post(f"{server.url}/v1/completions", content=json.dumps(ASK), headers=headers)
    assert "application/json; it came as text/plain" in plain.json()["error"]["message"]
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    chat = json.dumps({"model": "small", "messages": [picture]}).encode()
    assert "a part of type 'image_url' cannot be read" in _refused(server, chat, path="/v1/chat/completions")[1]
    limits = {"max_tokens": 4, "max_completion_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    chat = json.dumps({"model": "small", **limits}).encode()
    assert "say different things" in _refused(server, chat, path="/v1/chat/completions")[1]
    assert _refused(server, b"{}", path="/v1/nothing")[0] == 404
    assert _refused(server, json.dumps({"model": "small", "messages": []}).encode(), path="/v1/chat/completions")[0] == 400
    system = json.dumps({"model": "small", "messages": [{"role": "system", "content": "x"}]}).encode()
    assert _refused(server, system, path="/v1/chat/completions") == (
        400,
        "the model's chat template refuses this conversation: no system",
    )


def test_what_may_be_left_out_may_be_null(server: Served) -> None:
    fields = ("temperature", "top_p", "top_k", "repetition_penalty", "n", "seed", "stop", "stream", "stream_options", "user")
    body = {**ASK, **dict.fromkeys((*fields, "max_tokens", "echo"))}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] <= 16, answer.text
    assert refused(server, **{**ASK, "prompt": None})[1].startswith("prompt: ")


def test_a_wrong_key_is_refused_and_health_needs_none(server: Served) -> None:
    assert _refused(server, json.dumps(ASK).encode(), key="wrong") == (
        401,
        "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
    )
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/health").json()["status"] == "ready"


def test_a_large_body_is_refused_before_it_is_read(server: Served) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100000000\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + b"x" * 1000)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    pieces = iter([b"x" * 60000, b"x" * 60000])
    answer = httpx.post(f"{server.url}/v1/completions", content=pieces, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 413


def test_metrics_count_requests_and_tokens(server: Served, client: openai.OpenAI) -> None:
    def numbers() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    before = numbers()
    client.completions.create(model="small", prompt=PROMPT, max_tokens=5, temperature=0)
    after = numbers()
    assert after["oslo_new_tokens_total"] - before["oslo_new_tokens_total"] == 5
    name = 'oslo_requests_total{path="/v1/completions",status="200"}'
    assert after[name] - before.get(name, 0) == 1
    assert after["oslo_ready"] == 1
    log = [line for line in server.lines if line.get("path") == "/v1/completions"][-1]
    assert log["status"] == 200
    assert log["new_tokens"] == 5


def test_the_page_and_the_documentation_are_there(server: Served) -> None:
    page = httpx.get(server.url)
    assert '"small"' in page.text
    assert "{{model}}" not in page.text
    assert set(httpx.get(f"{server.url}/openapi.json").json()["paths"]) >= {"/v1/completions", "/v1/chat/completions"}


def test_a_client_that_leaves_ends_its_calls(server: Served) -> None:
    body = {**ASK, "max_tokens": 100, "stream": True, "n": 4, "temperature": 1}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 10
    while (told := httpx.get(f"{server.url}/health").json())["running"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert told["running"] == told["waiting"] == 0


def test_prompts_with_the_token_that_pads_in_them_run_together(client: openai.OpenAI, folder: Path) -> None:
    """In a chat the end of a turn often is that token; without a mask such a prompt would have to run alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first, second = [0, *tokenizer("fox").input_ids], [*tokenizer("dog").input_ids, 0, 40, 41]
    alone = [
        client.completions.create(model="small", prompt=ids, max_tokens=9, temperature=0).choices[0].text
        for ids in (first, second)
    ]
    together = client.completions.create(model="small", prompt=[first, second], max_tokens=9, temperature=0)
    assert [choice.text for choice in together.choices] == alone


def test_threads_with_prompts_of_their_own_get_their_own_texts(client: openai.OpenAI, folder: Path, unsplit: Any) -> None:
    prompts = [f"{PROMPT} {number} fox" for number in range(24)]
    texts: dict[str, str] = {}

    def ask(mine: list[str]) -> None:
        for prompt in mine:
            answer = client.completions.create(model="small", prompt=prompt, max_tokens=6 + len(prompt) % 3, temperature=0)
            texts[prompt] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(prompts[start::8],)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {prompt: text_of_unsplit(folder, unsplit, prompt, 6 + len(prompt) % 3) for prompt in prompts}


def test_shutting_down_lets_requests_end_and_leaves_no_process(folder: Path, unsplit: Any) -> None:
    with served(folder, "--name", "small") as server:
        workers = httpx.get(f"{server.url}/health").json()["workers"]
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="small", prompt=PROMPT, max_tokens=100, temperature=0, stream=True)
        text = next(iter(stream)).choices[0].text
        server.process.send_signal(signal.SIGTERM)
        text += "".join(event.choices[0].text for event in stream)
        assert text == text_of_unsplit(folder, unsplit, PROMPT, 100)
        server.process.wait(30)
        assert wait_until_gone(workers, 5) == []
        assert not any("Traceback" in line["event"] for line in server.lines)


def test_a_taken_port_ends_with_a_reason(folder: Path, unsplit: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            pytest.raises(AssertionError, match="cannot listen there"),
            served(folder, "--port", str(taken.getsockname()[1]), timeout_s=30),
        ):
            pass


@pytest.mark.parametrize(
    ("make", "options", "complaint"),
    [
        (False, (), "there is no such model"),
        (True, (), "the folder has no model in it"),
        (True, ("--dtype", "int8"), "'float32'"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path: Path, make: bool, options: tuple[str, ...], complaint: str) -> None:
    folder = tmp_path / "model"
    if make:
        folder.mkdir()
    with pytest.raises(AssertionError, match=complaint), served(folder, *options, timeout_s=60):
        pass


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fuzz_run_against_the_server_s_own_schema_finds_no_server_error(server: Served) -> None:
    import schemathesis
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: dict[int, int] = {}

    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def send(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body |= {"model": "small", "max_tokens": 1 + len(case.body)}  # or hardly any would get far
            answer = case.call(headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, case.as_curl_command()

        send()
    assert statuses[200] > 50
    assert statuses[400] > 50
    assert httpx.get(f"{server.url}/health").json()["status"] == "ready"
