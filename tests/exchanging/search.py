"""Looks for cases that break a property."""

from contextlib import suppress
from typing import cast

from engine.patches import Patches
from exchanging.case import Case
from exchanging.play import play
from exchanging.strategies import cases
from hypothesis import HealthCheck, Phase, given, seed, settings

SEED = 1


class Found(Exception):
    """What was looked for."""


def search(patches: Patches, wanted: str, count: int) -> dict[str, str]:
    """What the first case that breaks `wanted` breaks; of at most `count` cases, always the same.

    Empty when there is none.
    """
    broken: dict[str, str] = {}

    @seed(SEED)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases={Phase.generate},
        suppress_health_check=cast(list[HealthCheck], list(HealthCheck)),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(cases())
    def test(case: Case) -> None:
        wrong = {} if broken else play(case, patches)
        if wanted in wrong or broken:  # hypothesis plays the case that it found once more
            broken.update(wrong)
            raise Found

    with suppress(Found):
        test()
    return broken
