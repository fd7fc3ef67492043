"""The objects of a JSON list, one after the other: a list of gigabytes is never in memory."""

import codecs
from collections.abc import Iterator
from json import JSONDecodeError

from equipoise.balancer.formats.numbers import short
from equipoise.balancer.requests.traces.objects import decode, reason
from equipoise.balancer.requests.traces.source import Source

OBJECT_MOST = 1 << 26
"""Characters of one object at most."""


class Conversations:
    """Iterates over (line, value) of a list's objects.

    Raises `FormatError` that names the line: not JSON, not a list, cut off.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pieces = source.pieces()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._line = 1

    def __iter__(self) -> Iterator[tuple[int, object]]:
        self._expect("[")
        if self._next() == "]":
            self._advance(1)
        else:
            yield self._line, self._object()
            while self._expect(",]") == ",":
                self._next()
                yield self._line, self._object()
        if self._next():
            raise self._source.error(
                f"{short(self._rest())} behind the end of the list", self._line
            )

    def _expect(self, allowed: str) -> str:
        found = self._next()
        if not found or found not in allowed:
            what = short(self._rest()) if found else "the end of the file"
            expected = " or ".join(map(repr, allowed))
            raise self._source.error(f"is not JSON: {what}, expected {expected}", self._line)
        self._advance(1)
        return found

    def _object(self) -> object:
        while True:
            try:
                value, end = decode(self._text, self._at)
            except JSONDecodeError as error:
                # Perhaps only cut off. The text doubles each time: all tries cost as much as two.
                if len(self._text) - self._at <= OBJECT_MOST and self._more():
                    continue
                line = self._line + self._text.count("\n", self._at, error.pos)
                raise self._source.error(f"is not JSON: {reason(error)}", line) from None
            except ValueError as error:
                raise self._source.error(f"is not JSON: {reason(error)}", self._line) from None
            self._advance(end - self._at)
            return value

    def _next(self) -> str:
        """The next character that is no space, which is not passed; nothing at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._advance(1)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _advance(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _more(self) -> bool:
        """As much again as there is, and a piece at least; whether there was any."""
        parts = [self._text[self._at :]]
        wanted = len(parts[0])
        self._at = 0
        while (piece := next(self._pieces, None)) is not None:
            parts.append(self._decoded(piece))
            wanted -= len(piece)
            if wanted <= 0:
                break
        self._text = "".join(parts)
        return len(parts) > 1

    def _decoded(self, piece: bytes) -> str:
        try:
            return self._decoder.decode(piece)
        except UnicodeDecodeError:
            raise self._source.error("is not UTF-8 behind this line", self._line) from None

    def _rest(self) -> str:
        return self._text[self._at : self._at + 100]
