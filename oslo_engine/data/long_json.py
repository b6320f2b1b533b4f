"""A JSON line too long to hold: its text is found first, and then decoded in parts.

The line is scanned once. Long strings in it are replaced by a short stand-in; what remains is small and is parsed as JSON,
which checks the rest and says which string belongs to the key.
"""

from __future__ import annotations

import codecs
import json
import re
import uuid
from collections.abc import Iterator

from oslo_engine.data.lines import LongLine

_KEPT = 1 << 16  # bytes of a string that stays in the line
_INSIDE = re.compile(rb'(?:[^"\\\x00-\x1f]++|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])*+')
_HALF_CHARACTER = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_ESCAPE_BYTES = 6
_QUOTE = 0x22


def parse_long(line: LongLine) -> tuple[object, dict[str, LongLine]]:
    """The line with a stand-in for each long string, and the bytes of the file that each stands for.

    Raises:
        ValueError: it is not JSON.
    """
    mark = f"long-{uuid.uuid4().hex}-"
    places: dict[str, LongLine] = {}
    skeleton, string = bytearray(), bytearray()
    inside, begin, position, buffer = False, 0, line.start, b""
    for window in line.windows():
        buffer += window
        used = 0
        while used < len(buffer):
            if not inside:
                quote = buffer.find(b'"', used)
                end = len(buffer) if quote < 0 else quote
                skeleton += buffer[used:end]
                used = end
                if quote >= 0:
                    inside, used, begin = True, quote + 1, position + quote + 1
                    string.clear()
                continue
            end = _end_of_text(buffer, used)
            if position + end - begin <= _KEPT:
                string += buffer[used:end]
            used = end
            if used < len(buffer) and buffer[used] == _QUOTE:
                if position + used - begin > _KEPT:
                    name = f"{mark}{len(places)}"
                    places[name] = LongLine(line.path, begin, position + used)
                    string[:] = name.encode()
                skeleton += b'"' + string + b'"'
                inside, used = False, used + 1
            elif len(buffer) - used >= _ESCAPE_BYTES:
                raise ValueError(f"an invalid character or escape at byte {position + used - line.start} of the line")
            else:
                break  # an escape that goes on in the next window
        position += used
        buffer = buffer[used:]
    if inside or buffer:
        raise ValueError("a string that does not end")
    return json.loads(skeleton.decode()), places


def json_text(place: LongLine) -> Iterator[str]:
    """The text of a JSON string without its quotes, in parts.

    Raises:
        ValueError: it is not UTF-8, or holds half a character.
    """
    buffer = b""
    for window in place.windows():
        buffer += window
        end = _end_of_text(buffer, 0)
        if half := _HALF_CHARACTER.search(buffer, max(end - _ESCAPE_BYTES, 0), end):
            end = half.start()
        text, used = codecs.utf_8_decode(buffer[:end], "strict", False)
        yield json.loads(f'"{text}"')
        buffer = buffer[used:]
    if buffer:
        yield json.loads(f'"{buffer.decode()}"')


def plain_text(place: LongLine) -> Iterator[str]:
    """The text of a line, in parts.

    Raises:
        ValueError: it is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for window in place.windows():
        yield decoder.decode(window)
    yield decoder.decode(b"", True)


def _end_of_text(buffer: bytes, start: int) -> int:
    found = _INSIDE.match(buffer, start)
    return start if found is None else found.end()
