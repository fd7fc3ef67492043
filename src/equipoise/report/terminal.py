"""Styles of terminal text, used only where the terminal takes them."""

import os
import sys
from enum import StrEnum


class ColourMode(StrEnum):
    """Whether the terminal takes colours."""

    PLAIN = "plain"
    COLOUR = "colour"


class TextStyle(StrEnum):
    """Style of a piece of text."""

    BOLD = "1"
    DIM = "2"
    GREEN = "1;32"
    RED = "1;31"


def styled(text: str, tint: TextStyle, colours: ColourMode) -> str:
    """`text` in a tint, where there are colours."""
    return f"\033[{tint}m{text}\033[0m" if colours is ColourMode.COLOUR and text else text


def stdout_colour_mode() -> ColourMode:
    """What standard output takes. https://no-color.org: set and not empty means none."""
    return (
        ColourMode.COLOUR
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        else ColourMode.PLAIN
    )
