"""Tokens to text, piece by piece."""

from __future__ import annotations

import pytest

from oslo_engine.serve.faults import BadRequest
from oslo_engine.serve.schemas import Message
from oslo_engine.serve.text import TextPieces, encode_chat, encode_prompts


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    chat_template: str | None = None

    def __call__(self, text: str, **_: object) -> Bytes:
        self.input_ids = list(text.encode())
        return self

    def decode(self, tokens: list[int], **_: object) -> str:
        return bytes(tokens).decode(errors="replace")

    def __len__(self) -> int:
        return 256


def pieces(text: str, *stops: str) -> tuple[list[str], bool]:
    found = TextPieces(Bytes(), stops)
    given = []
    for token in text.encode():
        given.append(found.add(token))
        if found.stopped:
            return given, True
    return [*given, found.finish()], found.stopped


def test_text_comes_with_every_token() -> None:
    assert pieces("abc") == (["a", "b", "c", ""], False)


@pytest.mark.parametrize("text", ["grün", "a€b", "😀 ok", "日本語"])
def test_characters_of_several_tokens_come_whole(text: str) -> None:
    given, _ = pieces(text)
    assert "".join(given) == text
    assert not any("\ufffd" in piece for piece in given)


def test_an_unfinished_character_comes_at_the_end() -> None:
    found = TextPieces(Bytes())
    assert found.add(0xE2) == ""
    assert found.finish() == "\ufffd"


def test_a_stop_text_ends_the_text_and_is_not_part_of_it() -> None:
    given, stopped = pieces("one two three", "two")
    assert stopped
    assert "".join(given) == "one "


def test_what_may_become_a_stop_text_is_held_back_until_it_is_not() -> None:
    given, stopped = pieces("a\n\nb\nc", "\n\n\n")
    assert not stopped
    assert given[1:4] == ["", "", "\n\nb"]
    assert "".join(given) == "a\n\nb\nc"


def test_what_was_held_back_comes_at_the_end() -> None:
    assert "".join(pieces("ab", "bcd")[0]) == "ab"


def test_the_first_of_several_stop_texts_counts() -> None:
    assert "".join(pieces("xyz", "z", "y")[0]) == "x"


def test_prompts_come_as_text_or_tokens() -> None:
    assert encode_prompts(Bytes(), "ab") == [[97, 98]]
    assert encode_prompts(Bytes(), ["a", "b"]) == [[97], [98]]
    assert encode_prompts(Bytes(), [1, 2]) == [[1, 2]]
    assert encode_prompts(Bytes(), [[1, 2], [3]]) == [[1, 2], [3]]


@pytest.mark.parametrize(("prompt", "complaint"), [("", "no tokens"), ([300], "300 is not in the vocabulary")])
def test_prompts_that_cannot_be_run_are_refused(prompt: object, complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint):
        encode_prompts(Bytes(), prompt)


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        encode_chat(Bytes(), [Message(role="user", content="hi")])
