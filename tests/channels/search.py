"""Looks for cases that break a property."""

from collections.abc import Callable
from contextlib import suppress
from typing import cast

from channels.case import Case, Fault, case_from
from channels.mutants import Mutant
from channels.oracle import violations
from channels.play import play
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

LONGEST = 128
"""Bytes that a case is read off."""


class Found(Exception):
    """What was looked for."""


def cases(faults: tuple[Fault, ...]) -> st.SearchStrategy[Case]:
    """Cases in which one of these goes wrong."""
    return st.binary(min_size=LONGEST, max_size=LONGEST).map(lambda data: case_from(data, faults))


def each_of(faults: tuple[Fault, ...], count: int, tell: Callable[[Case], object]) -> None:
    """Tell of `count` cases, always the same."""

    @seed(1)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases={Phase.generate},
        suppress_health_check=cast(list[HealthCheck], list(HealthCheck)),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(cases(faults))
    def test(case: Case) -> None:
        tell(case)

    test()


def broken_by(mutant: Mutant, most: int) -> dict[str, str]:
    """What was seen of a mutant until its property was broken, in at most so many cases."""
    seen: dict[str, str] = {}

    def look(case: Case) -> None:
        if mutant.property in seen:
            raise Found
        seen.update(violations(case, play(case)))

    with suppress(Found), mutant.planted():
        each_of(mutant.faults, most, look)
    return seen
