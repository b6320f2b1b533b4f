"""From text to tokens and back, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from oslo_engine.serve.faults import BadRequest
from oslo_engine.serve.schemas import Message

_UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a longer character


class TextPieces:
    """Tokens one at a time, text as soon as it is sure: whole characters, and nothing that may be the start of a stop text.

    Args:
        stops: texts that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, list(stops)
        self._tokens: list[int] = []
        self._read_from = self._read_to = 0  # tokens before the first are done with; text up to the second was given out
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that became sure with this token."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._read_from : self._read_to])
        now = self._decode(self._tokens[self._read_from :])
        if len(now) <= len(before) or now.endswith(_UNFINISHED):
            return ""
        self._read_from, self._read_to = self._read_to, len(self._tokens)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """The rest, after the last token."""
        if self.stopped:
            return ""
        before = self._decode(self._tokens[self._read_from : self._read_to])
        text = self._release(self._decode(self._tokens[self._read_from :])[len(before) :])
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _release(self, text: str) -> str:
        text, self._held = self._held + text, ""
        found = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped = True
            return text[:found]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text


def _overlap(text: str, stop: str) -> int:
    """How much of the end of the text is the start of the stop text."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)


def encode_prompts(tokenizer: Any, prompt: Any) -> list[list[int]]:
    """A completion's prompt, whatever its form, as token ids of each text.

    Raises:
        BadRequest: a text is empty for the tokenizer, or an id is not in its vocabulary.
    """
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    else:
        prompts = [prompt] if isinstance(prompt[0], int) else list(prompt)
    ids = [tokenizer(one).input_ids if isinstance(one, str) else list(one) for one in prompts]
    _check(ids, len(tokenizer))
    return ids


def encode_chat(tokenizer: Any, messages: Iterable[Message]) -> list[int]:
    """A conversation in the model's own form, up to where the assistant is to go on.

    Raises:
        BadRequest: the model has no such form, or it does not allow this conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
    turns = [
        {"role": message.role, "content": message.text} | ({"name": message.name} if message.name else {})
        for message in messages
    ]
    try:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates raise what they like
        raise BadRequest(f"the model's chat template refuses this conversation: {error}", param="messages") from error
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    _check([ids], len(tokenizer))
    return ids


def _check(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    for ids in prompts:
        if not ids:
            raise BadRequest("the prompt has no tokens", param="prompt")
        if max(ids) >= vocabulary:
            raise BadRequest(f"token {max(ids)} is not in the vocabulary of {vocabulary}", param="prompt")
