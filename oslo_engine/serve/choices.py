"""One choice of an answer: a call of the deployed model whose tokens come into the event loop as text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import torch

from oslo_engine.deploy.batching import end_tokens
from oslo_engine.serve.schemas import Sampling
from oslo_engine.serve.text import TextPieces

_COLDEST = 1e-3  # below it the most likely token is all that is left


@dataclass
class Piece:
    """Of choice ``index``. ``finish_reason``: with the last one, "stop" or "length"."""

    index: int
    text: str
    num_tokens: int
    finish_reason: str | None = None


def generation_settings(request: Sampling, max_new_tokens: int, index: int) -> dict[str, Any]:
    """Arguments of ``generate`` for one choice of a request."""
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": request.temperature >= _COLDEST}
    settings |= {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}  # whatever the model's own say
    if settings["do_sample"]:
        settings |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
        if request.seed is not None:
            settings["seed"] = request.seed + index
    if request.repetition_penalty is not None:
        settings["repetition_penalty"] = request.repetition_penalty
    return settings


async def pieces(
    model: Any, tokenizer: Any, index: int, prompt: list[int], settings: dict[str, Any], stops: list[str]
) -> AsyncIterator[Piece]:
    """The text of one choice as it comes. Leaving it cancels the call.

    Args:
        model: a ``DeployedModel``.

    Raises:
        Exception: what the call raised.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[int | None] = asyncio.Queue()

    def tell(token: int | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(arrived.put_nowait, token)

    ends = set(end_tokens({}, model.generation_config))
    text, count, reason = TextPieces(tokenizer, stops), 0, "length"
    ids = torch.tensor([prompt])  # with a mask: what pads may be a part of a text, such as the end of a turn
    running = model.stream_to(tell, ids, attention_mask=torch.ones_like(ids), **settings)
    running.add_done_callback(lambda: tell(None))
    try:
        while (token := await arrived.get()) is not None:
            count += 1
            if token in ends:
                reason = "stop"
            fresh = text.add(token)
            if text.stopped:
                yield Piece(index, fresh, count, "stop")
                return
            if fresh:
                yield Piece(index, fresh, count)
        running.result()
        rest = text.finish()
        yield Piece(index, rest, count, "stop" if text.stopped else reason)
    finally:
        running.cancel()  # does nothing once it has ended


async def merged(iterators: list[AsyncIterator[Piece]]) -> AsyncIterator[Piece]:
    """The pieces of several choices, in the order in which they come."""
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def drain(iterator: AsyncIterator[Piece]) -> None:
        try:
            async for piece in iterator:
                queue.put_nowait(piece)
        except Exception as error:
            queue.put_nowait(error)
        queue.put_nowait(None)

    tasks = [asyncio.ensure_future(drain(iterator)) for iterator in iterators]
    try:
        open_ones = len(tasks)
        while open_ones:
            item = await queue.get()
            if item is None:
                open_ones -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
