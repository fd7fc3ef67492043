"""Colours on a terminal that takes them."""

import os
import sys
from enum import StrEnum


class Ink(StrEnum):
    """Whether the terminal takes colours."""

    PLAIN = "plain"
    COLOUR = "colour"


class Tint(StrEnum):
    """How a piece of text stands out."""

    BOLD = "1"
    DIM = "2"
    GREEN = "1;32"
    RED = "1;31"


def paint(text: str, tint: Tint, ink: Ink) -> str:
    """`text` in a tint, where there are colours."""
    return f"\033[{tint}m{text}\033[0m" if ink is Ink.COLOUR and text else text


def ink_of_stdout() -> Ink:
    """What standard output takes. https://no-color.org: set and not empty means none."""
    return Ink.COLOUR if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else Ink.PLAIN
