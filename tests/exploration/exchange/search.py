"""Looks for cases that break a property."""

from contextlib import suppress

from exploration.engine.patches import Patches
from exploration.exchange.case import Case
from exploration.exchange.run_case import play
from exploration.exchange.strategies import cases
from helpers.strategies.hypothesis_examples import each_of


class SearchEnded(Exception):
    """What was looked for."""


def search(patches: Patches, property_name: str, count: int) -> dict[str, str]:
    """What the first case that breaks `property_name` breaks; of at most `count` cases, always the
    same.

    Empty when there is none.
    """
    violations: dict[str, str] = {}

    def look(case: Case) -> None:
        broken_properties = {} if violations else play(case, patches)
        # hypothesis plays the case that it found once more
        if property_name in broken_properties or violations:
            violations.update(broken_properties)
            raise SearchEnded

    with suppress(SearchEnded):
        each_of(cases(), count, look)
    return violations
