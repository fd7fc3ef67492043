"""Looks for cases that break a property."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from exploration.engine.case import Case
from exploration.engine.oracle import violations
from exploration.engine.patches import Patches
from exploration.engine.run_case import play
from exploration.engine.strategies import MIXED
from helpers.strategies.hypothesis_examples import each_of

DRAWN_PER_PLAYED = 8
"""Cases that are drawn for each that is played."""


class SearchEnded(Exception):
    """What was looked for."""


@dataclass
class Search:
    """Cases until a property is broken.

    Attributes:
        patches: of the engine.
        property_name: the property that has to be broken.
        reaches: whether a case is worth playing.
        played: how many cases it took.
        broken: by property, what the first case that broke it showed.
        first: by property, how many cases had been played by then.
    """

    patches: Patches
    property_name: str
    reaches: Callable[[Case], bool] = lambda case: True
    played: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    _max_cases: int = 0

    def run(self, cases: int) -> "Search":
        """Play at most `cases`, with faults and without, of `DRAWN_PER_PLAYED` times as many."""
        self._max_cases = cases
        with suppress(SearchEnded):
            each_of(MIXED, cases * DRAWN_PER_PLAYED, self._try)
        return self

    def _try(self, case: Case) -> None:
        if self.property_name in self.broken:  # hypothesis plays the case that it found once more
            raise SearchEnded
        if not self.reaches(case):
            return
        if self.played == self._max_cases:
            raise SearchEnded
        self.played += 1
        for name, what in violations(play(case, self.patches)).items():
            self.broken.setdefault(name, what)
            self.first.setdefault(name, self.played)
        if self.property_name in self.broken:
            raise SearchEnded
