"""Requests and answers, in the form of OpenAI's API. Fields that are not here are refused, so none is silently ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _readable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not a text: it has half of a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_readable)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=False)


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
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Text | None = None

    @property
    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]


class CompletionRequest(Sampling):
    """``prompt``: one or several texts, or token ids."""

    prompt: Text | Annotated[list[Text], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    echo: bool = False


class TextPart(_Request):
    type: Literal["text"]
    text: Text


class Message(_Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
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
