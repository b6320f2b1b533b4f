"""The examples that put a deployed model behind a web framework, asked through the frameworks' own clients."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import oslo_engine as oslo
from served_model import save_small_model

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small")


@pytest.fixture(scope="module")
def unsplit(folder: Path) -> Any:
    return save_small_model(folder)


@pytest.fixture(scope="module")
def model(folder: Path, unsplit: Any) -> Iterator[Any]:
    with oslo.AutoModelForCausalLM.from_pretrained_with_parallel(
        folder, tensor_parallel_size=2, deployment=oslo.Deployment(threads_per_worker=1)
    ) as deployed:
        yield deployed


def test_flask_answers_with_the_unsplit_model_s_text(model: Any, unsplit: Any, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    client = example("flask_app").build_app(model, tokenizer).test_client()
    inputs = tokenizer("The quick", return_tensors="pt")
    wanted = tokenizer.decode(unsplit.generate(**inputs, max_new_tokens=32, do_sample=False)[0], skip_special_tokens=True)
    assert client.post("/generate", json={"text": "The quick"}).get_json() == {"text": wanted}
    assert client.post("/generate", json=["text"]).status_code == 400
    assert client.get("/health").get_json() == {"state": "ready"}


def test_fastapi_streams_a_text(model: Any, folder: Path) -> None:
    import asyncio

    import httpx

    app = example("fastapi_stream").build_app(model, AutoTokenizer.from_pretrained(folder))

    async def ask() -> tuple[int, str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            answer = await client.get("/stream", params={"text": "The quick", "max_new_tokens": 12})
            return answer.status_code, answer.text

    torch.manual_seed(0)
    status, text = asyncio.run(ask())
    assert status == 200
    assert text
