"""A model on two devices behind FastAPI, its text streamed word by word.

    python examples/fastapi_stream.py gpt2                  (pip install 'oslo-engine[serve]')
    curl -N 'localhost:8000/stream?text=Once+upon+a+time'

For an API that OpenAI's clients speak there is ``oslo-engine serve``; this shows how to build one of your own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from transformers import AutoTokenizer

from oslo_engine import AutoModelForCausalLM
from oslo_engine.serve.text import TextPieces


def build_app(model: Any, tokenizer: Any) -> FastAPI:
    app = FastAPI()

    @app.get("/stream")
    def stream(text: str, max_new_tokens: int = 64) -> StreamingResponse:
        ids = tokenizer(text, return_tensors="pt").input_ids
        running = model.stream(ids, max_new_tokens=max_new_tokens, do_sample=True, temperature=0.8)

        def pieces() -> Iterator[str]:
            whole = TextPieces(tokenizer)  # characters may have several tokens
            for token in running:
                yield whole.add(token)
            yield whole.finish()

        return StreamingResponse(pieces(), media_type="text/plain")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="hub name or folder")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with AutoModelForCausalLM.from_pretrained_with_parallel(
        options.model, tensor_parallel_size=options.tp, deployment=True
    ) as model:
        uvicorn.run(build_app(model, tokenizer), port=options.port)


if __name__ == "__main__":
    main()
