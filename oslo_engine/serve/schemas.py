"""Requests and answers, in the form of OpenAI's API. Fields that are not here are refused, so none is silently ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _readable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not a text: it has half of a surrogate pair") from None
    return text


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def _checked_prompt(given: Any) -> Any:
    """What is wrong with a prompt is said of the form that it was meant in, and not of all that it could have had."""
    if isinstance(given, str):
        return _readable(given)
    if not isinstance(given, list):
        raise ValueError("must be a text, a list of texts, token ids or a list of these")
    if not given or [] in given:
        raise ValueError("must have at least one token" if given != [] else "must not be an empty list")
    if all(isinstance(one, str) for one in given):
        return [_readable(one) for one in given]
    texts = [given] if _is_ids(given) else given
    if not all(map(_is_ids, texts)):
        raise ValueError("must be texts only, or token ids (whole numbers) only")
    wrong = next((token for ids in texts for token in ids if not 0 <= token < 2**31), None)
    if wrong is not None:
        raise ValueError(f"{wrong} is no token id")
    return given


def _checked_stops(given: Any) -> Any:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ValueError("must be a text or a list of texts")
    if len(given) > _MOST_STOPS:
        raise ValueError(f"at most {_MOST_STOPS} stop texts, not {len(given)}")
    return [_readable(one) for one in given]


def _checked_content(given: Any) -> Any:
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise ValueError("must be a text, or a list of parts of type 'text'")
    other = next((part.get("type") for part in given if part.get("type") != "text"), "text")
    if other != "text":
        raise ValueError(f"a part of type {other!r} cannot be read: this model takes texts only")
    return given


_MOST_STOPS = 4  # as in OpenAI's API
Text = Annotated[str, AfterValidator(_readable)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """A field that may be left out may be null, which means the same."""
        if not isinstance(given, dict):
            return given
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name in required}


class StreamOptions(_Request):
    """``include_usage``: send one more event with the number of tokens."""

    include_usage: bool = False


class Sampling(_Request):
    """What both kinds of completion have in common.

    ``temperature`` 0 takes the most likely token. ``top_k`` and ``repetition_penalty`` are not OpenAI's. ``user`` is logged.
    """

    model: Text
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: Annotated[Text | Annotated[list[Text], Field(max_length=_MOST_STOPS)] | None, BeforeValidator(_checked_stops)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Text | None = None

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]


class CompletionRequest(Sampling):
    """``prompt``: one or several texts, or token ids."""

    prompt: Annotated[
        Text | Annotated[list[Text], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)],
        BeforeValidator(_checked_prompt),
    ]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    echo: bool = False


class TextPart(_Request):
    type: Literal["text"]
    text: Text


class Message(_Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text | list[TextPart], BeforeValidator(_checked_content)]
    name: Text | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None


class Completion(BaseModel):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatMessage(BaseModel):
    role: str = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: None = None


class ChatCompletion(BaseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "oslo-engine"


class ModelList(BaseModel):
    object: str = "list"
    data: list[ModelCard]


class Fault(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    error: Fault


class HealthAnswer(BaseModel):
    status: str
    workers: list[int]
    restarts: int
    waiting: int
    running: int
    uptime_s: float


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be served as it is; the message says why."},
    "5XX": {"model": ErrorAnswer, "description": "The model cannot answer just now."},
}
