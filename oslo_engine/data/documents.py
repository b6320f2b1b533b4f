"""What a unit's records say: documents, and problems with records that are none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from oslo_engine.data.lines import LongLine, lines_of
from oslo_engine.data.long_json import json_text, parse_long, plain_text
from oslo_engine.data.units import DocumentBlock, LineBlock, Problem, TextRange, Unit


class LongText:
    """A text that is given in parts, as often as it is asked for."""

    def __init__(self, parts: Callable[[], Iterator[str]]) -> None:
        self.parts = parts

    def check(self) -> None:
        """Raises ValueError where a part cannot be had, before any of them is used."""
        for part in self.parts():
            part.encode()


Texts = list[str] | list[LongText]
Found = Texts | Problem


def documents_of(unit: Unit, may_cut: bool) -> Iterator[Found]:
    """The documents of a unit, each as the texts of its sequences.

    Args:
        may_cut: texts of long lines may come in parts.
    """
    if isinstance(unit, DocumentBlock):
        for at, item in enumerate(unit.documents):
            yield _document(item, unit.where, "item", unit.first + at)
    elif isinstance(unit, LineBlock):
        for at, line in enumerate(unit.content.split(b"\n")[: -1 if unit.content.endswith(b"\n") else None]):
            yield from _of_line(line, unit.json_key, unit.path, "line", unit.first_line + at)
    else:
        for offset, found in lines_of(unit):
            if isinstance(found, LongLine) and may_cut:
                yield from _of_long_line(found, unit, offset)
            else:
                line = found.read() if isinstance(found, LongLine) else found
                yield from _of_line(line, unit.json_key, unit.path, "byte", offset)


def _of_line(line: bytes, json_key: str | None, path: str, place: str, position: int) -> Iterator[Found]:
    try:
        text = line.decode()
        if json_key is None:
            yield [text.removesuffix("\r")]
            return
        if not text or text.isspace():
            return
        record = json.loads(text)
    except UnicodeDecodeError as error:
        yield Problem(path, place, position, f"not valid UTF-8: {error.reason} at byte {error.start} of the line")
    except ValueError as error:
        yield Problem(path, place, position, f"not valid JSON: {error}")
    except RecursionError:
        yield Problem(path, place, position, "JSON nested too deeply")
    else:
        yield _of_record(record, json_key, path, place, position)


def _of_record(record: object, json_key: str, path: str, place: str, position: int) -> Found:
    if not isinstance(record, dict):
        return Problem(path, place, position, f"a JSON object was expected, this is a {type(record).__name__}")
    if json_key not in record:
        return Problem(path, place, position, f"no key {json_key!r}; there are: {', '.join(map(repr, record)) or 'none'}")
    return _document(record[json_key], path, place, position)


def _of_long_line(line: LongLine, unit: TextRange, position: int) -> Iterator[Found]:
    try:
        text = LongText(lambda: _without_carriage_return(plain_text(line)))
        if unit.json_key is not None:
            record, places = parse_long(line)
            found = _of_record(record, unit.json_key, unit.path, "byte", position)
            if isinstance(found, Problem) or not places.keys() & set(found):  # type: ignore[arg-type]
                yield found
                return
            if len(found) > 1:  # sequences, a long one among them
                yield from _of_line(line.read(), unit.json_key, unit.path, "byte", position)
                return
            place = places[str(found[0])]
            text = LongText(lambda: json_text(place))
        text.check()
        yield [text]
    except UnicodeEncodeError:
        yield Problem(unit.path, "byte", position, "half a character (a lone surrogate)")
    except UnicodeError as error:
        yield Problem(unit.path, "byte", position, f"not valid UTF-8: {getattr(error, 'reason', error)}")
    except ValueError as error:
        yield Problem(unit.path, "byte", position, f"not valid JSON: {error}")
    except RecursionError:
        yield Problem(unit.path, "byte", position, "JSON nested too deeply")


def _without_carriage_return(parts: Iterator[str]) -> Iterator[str]:
    held = ""
    for part in parts:
        text = held + part
        held = "\r" if text.endswith("\r") else ""
        yield text.removesuffix(held)


def _document(value: Any, path: str, place: str, position: int) -> Found:
    texts = value if isinstance(value, (list, tuple)) else [value]
    for text in texts:
        if not isinstance(text, str):
            what = "nothing" if text is None else f"a {type(text).__name__}"
            return Problem(path, place, position, f"a text or a list of texts was expected, there is {what}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                return Problem(path, place, position, f"half a character (a lone surrogate) at position {error.start}")
    return list(texts)
