"""Reads the few numbers that are wanted out of what a server tells Prometheus.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/, the text one. A server tells
much more than is wanted, several times a second: only lines of wanted names are looked at.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

LABELS = r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}'
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')


class Unreadable(Exception):
    """A page that does not say what it was expected to say."""


@dataclass(frozen=True)
class Sample:
    """One line: what is counted, for which labels, and how many there are."""

    name: str
    labels: Mapping[str, str]
    value: float


class Reader:
    """Finds samples of some names.

    Args:
        names: of metrics.
    """

    def __init__(self, names: Sequence[str]) -> None:
        longest_first = sorted(names, key=len, reverse=True)
        either = "|".join(map(re.escape, longest_first))
        self._line = re.compile(rf"^({either})(?:{LABELS})?[ \t]+(\S+)", re.MULTILINE)

    def samples(self, page: str) -> Iterator[Sample]:
        """In their order. Raises Unreadable for a value that is no number."""
        for found in self._line.finditer(page):
            labels = dict(LABEL.findall(found[2])) if found[2] else {}
            yield Sample(found[1], labels, _number(found[1], found[3]))


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise Unreadable(f"{name} is {text!r}") from None
    if not isfinite(value) or value < 0:
        raise Unreadable(f"{name} is {text}")
    return value
