"""Lines of styled text for a terminal: their width in cells, cutting, escape sequences."""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Style(StrEnum):
    """What a piece of text is, which the terminal or the picture gives a look."""

    PLAIN = "plain"
    DIM = "dim"
    BOLD = "bold"
    WORK = "work"
    """What ranks compute."""
    WAIT = "wait"
    """What they wait."""


@dataclass(frozen=True)
class Span:
    """Text in one style."""

    text: str
    style: Style = Style.PLAIN


Line = tuple[Span, ...]


@lru_cache(maxsize=4096)
def cells(letter: str) -> int:
    """Columns that a printable character takes in a terminal: 0, 1 or 2."""
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1


def width(text: str) -> int:
    """Columns that a text takes."""
    return sum(map(cells, text))


def visible(text: str) -> str:
    """Text without what drives a terminal: white space as spaces, the rest that is not printable
    as a middle dot."""
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "·" for letter in text
    )


def cut(text: str, columns: int) -> str:
    """As much from the beginning as these columns hold."""
    used = 0
    for index, letter in enumerate(text):
        used += cells(letter)
        if used > columns:
            return text[:index]
    return text


def cut_front(text: str, columns: int) -> str:
    """As much of the end as these columns hold."""
    used = 0
    for index in range(len(text) - 1, -1, -1):
        used += cells(text[index])
        if used > columns:
            return text[index + 1 :]
    return text


def cut_line(line: Iterable[Span], columns: int) -> Line:
    """A line no wider than this."""
    spans, left = [], columns
    for span in line:
        text = cut(span.text, left)
        left -= width(text)
        if text:
            spans.append(Span(text, span.style))
        if len(text) < len(span.text):
            break
    return tuple(spans)


def plain(line: Line) -> str:
    """The text of a line."""
    return "".join(span.text for span in line)


ANSI_BASIC = {Style.DIM: "2", Style.BOLD: "1", Style.WORK: "36", Style.WAIT: "33"}
ANSI_256 = {Style.DIM: "2", Style.BOLD: "1", Style.WORK: "38;5;33", Style.WAIT: "38;5;208"}
"""Blue and orange: apart for common colour blindnesses, and readable on light and dark."""


def to_ansi(line: Line, codes: dict[Style, str]) -> str:
    """A line with escape sequences for those styles that have a code."""
    return "".join(
        f"\033[{codes[span.style]}m{span.text}\033[0m" if span.style in codes else span.text
        for span in line
    )
