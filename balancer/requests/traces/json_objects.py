"""Reads JSON objects with expected fields, and JSON lists too large for memory one by one."""

import codecs
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder

from equipoise.balancer.formats.numbers import INT64_LIMIT, short_repr
from equipoise.balancer.requests.traces.trace_file import TraceFile


def _constant(name: str) -> object:
    raise ValueError(f"{name} is not a number of JSON")


DECODER = JSONDecoder(parse_constant=_constant)


def decode_value(text: str, begin: int = 0) -> tuple[object, int]:
    """Decodes the value that begins at `begin`; returns it and its end.

    Raises JSONDecodeError if the text is not JSON, or ends too early; ValueError if it is nested
    too deep, or a number is too long.
    """
    try:
        return DECODER.raw_decode(text, begin)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def error_reason(error: ValueError) -> str:
    """Returns in a few words why a text is not JSON."""
    return error.msg.removesuffix(" at") if isinstance(error, JSONDecodeError) else str(error)[:80]


def object_field(value: object, name: str) -> object:
    """Returns a field of an object. Raises `ValueError`."""
    if not isinstance(value, dict):
        raise ValueError(f"is {short_repr(value)}, expected an object")
    if name not in value:
        raise ValueError(f"has no {name}")
    field: object = value[name]
    return field


def integer_field(value: object, name: str, least: int, most: int = INT64_LIMIT - 1) -> int:
    """Returns an integer field. Raises `ValueError`."""
    number = object_field(value, name)
    if type(number) is not int:
        raise ValueError(f"{name} is {short_repr(number)}, expected a whole number")
    if not least <= number <= most:
        raise ValueError(f"{name} is {short_repr(number)}, expected {least} to {most}")
    return number


def string_field(value: object, name: str) -> str:
    """Returns a string field. Raises `ValueError`."""
    text = object_field(value, name)
    if not isinstance(text, str):
        raise ValueError(f"{name} is {short_repr(text)}, expected a string")
    return text


def list_field(value: object, name: str) -> list[object]:
    """Returns a list field. Raises `ValueError`."""
    items = object_field(value, name)
    if not isinstance(items, list):
        raise ValueError(f"{name} is {short_repr(items)}, expected a list")
    return items


MAX_OBJECT_CHARS = 1 << 26
"""Upper limit of one object: a list that is cut off must not be read into memory whole."""


class JsonListReader:
    """Iterates over the objects of a JSON list, as (line, value), without holding the whole list.

    Raises `FormatError` that names the line, if it is not JSON, not a list, or cut off.
    """

    def __init__(self, source: TraceFile) -> None:
        self._source = source
        self._pieces = source.pieces()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._line = 1

    def __iter__(self) -> Iterator[tuple[int, object]]:
        self._expect("[")
        if self._next_character() == "]":
            self._advance(1)
        else:
            yield self._line, self._object()
            while self._expect(",]") == ",":
                self._next_character()
                yield self._line, self._object()
        if self._next_character():
            raise self._source.error(
                f"{short_repr(self._unread_start())} after the end of the list", self._line
            )

    def _expect(self, allowed: str) -> str:
        character = self._next_character()
        if not character or character not in allowed:
            mismatch = short_repr(self._unread_start()) if character else "the end of the file"
            expected = " or ".join(map(repr, allowed))
            raise self._source.error(f"is not JSON: {mismatch}, expected {expected}", self._line)
        self._advance(1)
        return character

    def _object(self) -> object:
        while True:
            try:
                value, end = decode_value(self._text, self._at)
            except JSONDecodeError as error:
                # Perhaps only cut off: read more. The text doubles each time, so all attempts
                # together cost as much as two.
                if len(self._text) - self._at <= MAX_OBJECT_CHARS and self._read_more():
                    continue
                line = self._line + self._text.count("\n", self._at, error.pos)
                raise self._source.error(f"is not JSON: {error_reason(error)}", line) from None
            except ValueError as error:
                raise self._source.error(
                    f"is not JSON: {error_reason(error)}", self._line
                ) from None
            self._advance(end - self._at)
            return value

    def _next_character(self) -> str:
        """Skips spaces; returns the next character without consuming it, or "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._advance(1)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read_more():
                return ""

    def _advance(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _read_more(self) -> bool:
        """Reads as much again as is unread, at least a piece; returns whether there was any."""
        parts = [self._text[self._at :]]
        remaining_chars = len(parts[0])
        self._at = 0
        while (piece := next(self._pieces, None)) is not None:
            parts.append(self._decode(piece))
            remaining_chars -= len(piece)
            if remaining_chars <= 0:
                break
        self._text = "".join(parts)
        return len(parts) > 1

    def _decode(self, piece: bytes) -> str:
        try:
            return self._decoder.decode(piece)
        except UnicodeDecodeError:
            raise self._source.error("is not UTF-8 after this line", self._line) from None

    def _unread_start(self) -> str:
        return self._text[self._at : self._at + 100]
