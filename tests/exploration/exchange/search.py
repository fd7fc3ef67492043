"""Looks for cases that break a property."""

from contextlib import suppress

from exploration.engine.patches import Patches
from exploration.exchange.case import Case
from exploration.exchange.run_case import play
from exploration.exchange.strategies import cases
from helpers.strategies.hypothesis_examples import each_of


class Found(Exception):
    """What was looked for."""


def search(patches: Patches, wanted: str, count: int) -> dict[str, str]:
    """What the first case that breaks `wanted` breaks; of at most `count` cases, always the same.

    Empty when there is none.
    """
    broken: dict[str, str] = {}

    def look(case: Case) -> None:
        wrong = {} if broken else play(case, patches)
        if wanted in wrong or broken:  # hypothesis plays the case that it found once more
            broken.update(wrong)
            raise Found

    with suppress(Found):
        each_of(cases(), count, look)
    return broken
