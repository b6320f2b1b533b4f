"""The page of the server, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from browser import Page, browser, find_browser
from served_model import Served, save_small_model, served

KEY = "the key"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small")


@pytest.fixture(scope="module")
def unsplit(folder: Path) -> Any:
    return save_small_model(folder)


@pytest.fixture(scope="module")
def server(folder: Path, unsplit: Any) -> Iterator[Served]:
    if find_browser() is None:
        pytest.skip("no Chromium is installed")
    with served(folder, "--tp", "2", "--name", "a <b> model", "--api-key", KEY) as running:
        yield running


@pytest.fixture(scope="module")
def page(server: Served) -> Iterator[Page]:
    with browser(find_browser() or "") as opened:
        opened.open(server.url)
        yield opened


def fill(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        page.run(f"document.getElementById('{name}').value = {json.dumps(value)}")


def answer(page: Page) -> str:
    page.run("document.getElementById('go').click()")
    page.wait_for("!document.getElementById('go').disabled")
    return str(page.run("document.getElementById('answer').textContent"))


def text_of_unsplit(folder: Path, unsplit: Any, prompt: str, new: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    output = unsplit.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_it_shows_the_model_and_its_state(page: Page) -> None:
    assert page.run("document.title") == "a <b> model"
    assert page.run("document.getElementById('name').textContent") == "a <b> model"
    page.wait_for("document.getElementById('state').textContent.startsWith('ready, 2 workers')")
    assert page.console == []


def test_a_wrong_key_is_told(page: Page) -> None:
    fill(page, key="wrong")
    assert "API key is missing or wrong" in answer(page)
    assert page.run("document.getElementById('answer').className") == "wrong"


def test_it_streams_completions_and_chats(page: Page, folder: Path, unsplit: Any) -> None:
    fill(page, key=KEY, prompt="The quick brown", tokens="12", temperature="0", kind="completions")
    assert answer(page) == text_of_unsplit(folder, unsplit, "The quick brown", 12)
    fill(page, prompt="five", kind="chat/completions")
    assert answer(page) == text_of_unsplit(folder, unsplit, "<user>five", 12)
    assert page.run("document.getElementById('answer').className") == ""
    assert page.console == []


def test_stop_ends_the_request_on_the_server(page: Page, server: Served) -> None:
    fill(page, key=KEY, prompt="The", tokens="100", temperature="1", kind="completions")
    page.run("document.getElementById('go').click()")
    page.wait_for("document.getElementById('answer').textContent.length > 0")
    page.run("document.getElementById('stop').click()")
    page.wait_for("!document.getElementById('go').disabled")
    page.wait_for("fetch('health').then(a => a.json()).then(told => told.running + told.waiting === 0)")
    assert httpx.get(f"{server.url}/health").json()["running"] == 0
    fill(page, tokens="5", temperature="0")
    answer(page)
    assert page.run("document.getElementById('answer').className") == ""
