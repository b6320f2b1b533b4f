"""The HTTP application: OpenAI's completions and chat, health, metrics and a page to try the model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from oslo_engine.serve import schemas
from oslo_engine.serve.choices import Piece, generation_settings, merged, pieces
from oslo_engine.serve.faults import BadRequest, Refusal, refusal_of, wrong_form
from oslo_engine.serve.gate import Gate
from oslo_engine.serve.metrics import Metrics, missing
from oslo_engine.serve.schemas import ChatRequest, CompletionRequest, Sampling
from oslo_engine.serve.settings import ServerSettings
from oslo_engine.serve.text import encode_chat, encode_prompts

_DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
_DISCONNECT_CHECK_S = 0.5


@dataclass
class _Answer:
    """One answer in the making: its prompts as tokens, and where its choices begin."""

    id: str
    request: Sampling
    prompts: list[list[int]]
    max_new_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.request.n

    @property
    def usage(self) -> schemas.Usage:
        prompt, new = sum(map(len, self.prompts)), sum(self.counts.values())
        return schemas.Usage(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new)


class Server:
    """What the routes do.

    Args:
        model: a ``DeployedModel``.
        tokenizer: of Transformers.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: ServerSettings) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.metrics = Metrics(model.health)
        self._context = getattr(model.config, "max_position_embeddings", None)
        self._started = int(time.time())

    def card(self) -> schemas.ModelCard:
        return schemas.ModelCard(id=self.settings.name, created=self._started)

    def completion(self, request: CompletionRequest, request_id: str) -> _Answer:
        self._check_model(request)
        prompts = encode_prompts(self.tokenizer, request.prompt)
        return self._answer(f"cmpl-{request_id}", request, prompts, request.max_tokens or _DEFAULT_COMPLETION_TOKENS)

    def chat(self, request: ChatRequest, request_id: str) -> _Answer:
        self._check_model(request)
        prompt = encode_chat(self.tokenizer, request.messages)
        limits = {limit for limit in (request.max_completion_tokens, request.max_tokens) if limit is not None}
        if len(limits) > 1:
            raise BadRequest("max_tokens and max_completion_tokens say different things; leave one out", param="max_tokens")
        limit = next(iter(limits), None)
        if limit is None:
            room = self.settings.max_new_tokens if self._context is None else self._context - len(prompt)
            limit = max(1, min(self.settings.max_new_tokens, room))
        return self._answer(f"chatcmpl-{request_id}", request, [prompt], limit)

    def _check_model(self, request: Sampling) -> None:
        if request.model != self.settings.name:
            raise BadRequest(
                f"there is no model {request.model!r} here; it is {self.settings.name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _answer(self, name: str, request: Sampling, prompts: list[list[int]], limit: int) -> _Answer:
        if limit > self.settings.max_new_tokens:
            raise BadRequest(f"at most {self.settings.max_new_tokens} tokens can be asked for, not {limit}", param="max_tokens")
        longest = max(map(len, prompts))
        if self._context is not None and longest + limit > self._context:
            raise BadRequest(
                f"a prompt of {longest} tokens and {limit} new ones do not fit into the model's {self._context}",
                param="prompt",
                code="context_length_exceeded",
            )
        answer = _Answer(name, request, prompts, limit)
        if answer.num_choices > self.settings.max_choices:
            raise BadRequest(f"at most {self.settings.max_choices} choices, not {answer.num_choices}", param="n")
        if answer.num_choices > self.model.settings.max_queue:
            raise BadRequest(
                f"{answer.num_choices} choices never fit into the server's queue of {self.model.settings.max_queue}", param="n"
            )
        return answer

    async def run(self, answer: _Answer, note: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices; counts what they cost."""
        request, start = answer.request, time.monotonic()
        iterators = [
            pieces(
                self.model,
                self.tokenizer,
                index,
                answer.prompts[index // request.n],
                generation_settings(request, answer.max_new_tokens, index),
                request.stops,
            )
            for index in range(answer.num_choices)
        ]
        first = True
        try:
            async for piece in merged(iterators):
                if first:
                    self.metrics.first_token_seconds.observe(time.monotonic() - start)
                    first = False
                answer.counts[piece.index] = piece.num_tokens
                yield piece
        finally:
            usage = answer.usage
            self.metrics.prompt_tokens.inc(usage.prompt_tokens)
            self.metrics.new_tokens.inc(usage.completion_tokens)
            note.update(prompt_tokens=usage.prompt_tokens, new_tokens=usage.completion_tokens)
            if request.user is not None:
                note["user"] = request.user

    async def collect(self, answer: _Answer, http: Any) -> tuple[list[str], list[str | None]]:
        """Texts and finish reasons of all choices. A client that leaves cancels them."""

        async def gather() -> tuple[list[str], list[str | None]]:
            texts, reasons = [""] * answer.num_choices, [None] * answer.num_choices  # type: list[str], list[str | None]
            async with contextlib.aclosing(self.run(answer, http.state.note)) as run:
                async for piece in run:
                    texts[piece.index] += piece.text
                    reasons[piece.index] = piece.finish_reason or reasons[piece.index]
            return texts, reasons

        task = asyncio.ensure_future(gather())
        try:
            while not (await asyncio.wait({task}, timeout=_DISCONNECT_CHECK_S))[0]:
                if await http.is_disconnected():
                    raise Refusal("the client has left", status=499, kind="invalid_request_error")
            return task.result()
        finally:
            task.cancel()


def _echoes(server: Server, answer: _Answer) -> list[str]:
    request = answer.request
    if not (isinstance(request, CompletionRequest) and request.echo):
        return [""] * answer.num_choices
    shown = [server.tokenizer.decode(prompt, skip_special_tokens=True) for prompt in answer.prompts]
    return [shown[index // request.n] for index in range(answer.num_choices)]


async def _events(server: Server, answer: _Answer, note: dict[str, Any], chat: bool) -> AsyncIterator[str]:
    """Server-sent events of a streamed answer. What fails after the first of them is an event too."""
    head = {
        "id": answer.id,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": answer.created,
        "model": server.settings.name,
    }
    options = answer.request.stream_options
    usage = options is not None and options.include_usage

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **({'usage': None} if usage else {}), **more})}\n\n"

    def choice(index: int, text: str, reason: str | None, first: bool = False) -> dict[str, Any]:
        if not chat:
            return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}

    try:
        for index, text in enumerate(_echoes(server, answer)):
            if chat or text:
                yield event([choice(index, text, None, first=True)])
        async with contextlib.aclosing(server.run(answer, note)) as run:
            async for piece in run:
                yield event([choice(piece.index, piece.text, piece.finish_reason)])
        if usage:
            yield event([], usage=answer.usage.model_dump())
        yield "data: [DONE]\n\n"
    except Exception as error:
        note["error"] = str(error).partition("\n")[0]
        yield f"data: {json.dumps(refusal_of(error).as_json())}\n\n"


def build_app(model: Any, tokenizer: Any, settings: ServerSettings) -> Any:
    """The application, to be run by uvicorn or another ASGI server; it does not close the model.

    Args:
        model: a ``DeployedModel``. tokenizer: of Transformers.

    Raises:
        MissingDependencyError: fastapi or prometheus_client is not installed.
    """
    try:
        from fastapi import FastAPI, Request
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
        from starlette.exceptions import HTTPException
    except ImportError:
        raise missing("fastapi") from None
    from oslo_engine import __version__

    server = Server(model, tokenizer, settings)
    app = FastAPI(title="oslo_engine", version=__version__, description=f"Serves {settings.name}.", redoc_url=None)
    app.add_middleware(Gate, settings=settings, metrics=server.metrics)
    page = files("oslo_engine.serve").joinpath("page.html").read_text(encoding="utf-8")

    def with_request(route: Any) -> Any:
        """FastAPI reads annotations, and its names are not known where this module is imported."""
        route.__annotations__["http"] = Request
        return route

    def refused(refusal: Refusal) -> JSONResponse:
        return JSONResponse(refusal.as_json(), refusal.status)

    @app.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> JSONResponse:
        return refused(wrong_form(error.errors(), error.body, request.headers.get("content-type", "")))

    @app.exception_handler(HTTPException)
    async def wrong_place(_: Request, error: HTTPException) -> JSONResponse:
        response = refused(BadRequest(str(error.detail), status=error.status_code))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return refused(refusal_of(error))

    @app.post("/v1/completions", response_model=schemas.Completion, responses=schemas.REFUSALS)
    @with_request
    async def complete(body: CompletionRequest, http: Any) -> Any:
        try:
            answer = server.completion(body, http.state.request_id)
            if body.stream:
                return StreamingResponse(_events(server, answer, http.state.note, False), media_type="text/event-stream")
            texts, reasons = await server.collect(answer, http)
        except Exception as error:
            return refused(refusal_of(error))
        choices = [
            schemas.CompletionChoice(index=index, text=echo + text, finish_reason=reason)
            for index, (echo, text, reason) in enumerate(zip(_echoes(server, answer), texts, reasons, strict=True))
        ]
        return schemas.Completion(
            id=answer.id, created=answer.created, model=settings.name, choices=choices, usage=answer.usage
        )

    @app.post("/v1/chat/completions", response_model=schemas.ChatCompletion, responses=schemas.REFUSALS)
    @with_request
    async def converse(body: ChatRequest, http: Any) -> Any:
        try:
            answer = server.chat(body, http.state.request_id)
            if body.stream:
                return StreamingResponse(_events(server, answer, http.state.note, True), media_type="text/event-stream")
            texts, reasons = await server.collect(answer, http)
        except Exception as error:
            return refused(refusal_of(error))
        choices = [
            schemas.ChatChoice(index=index, message=schemas.ChatMessage(content=text), finish_reason=reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return schemas.ChatCompletion(
            id=answer.id, created=answer.created, model=settings.name, choices=choices, usage=answer.usage
        )

    @app.get("/v1/models", responses=schemas.REFUSALS)
    async def models() -> schemas.ModelList:
        return schemas.ModelList(data=[server.card()])

    @app.get("/v1/models/{name:path}", responses=schemas.REFUSALS)
    async def one_model(name: str) -> schemas.ModelCard:
        if name != settings.name:
            raise HTTPException(404, f"there is no model {name!r} here")
        return server.card()

    @app.get("/health", responses={503: {"model": schemas.HealthAnswer}})
    async def health() -> Any:
        told = model.health()
        answer = schemas.HealthAnswer(
            status=told.state,
            workers=list(told.pids),
            restarts=told.restarts,
            waiting=told.waiting,
            running=told.running,
            uptime_s=round(told.uptime_s, 1),
        )
        return JSONResponse(answer.model_dump(), 200 if told.ok else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def numbers() -> Any:
        return PlainTextResponse(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def front() -> str:
        return page.replace("{{model}}", json.dumps(settings.name).replace("<", "\\u003c"))

    return app
