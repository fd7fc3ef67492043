"""Looks for cases that break a property."""

from contextlib import suppress

from exploration.channel.case import Case, Fault, case_from
from exploration.channel.mutants import Mutant
from exploration.channel.oracle import violations
from exploration.channel.run_case import play
from helpers.strategies.hypothesis_examples import each_of
from hypothesis import strategies as st

LONGEST = 128
"""Bytes that a case is read off."""


class SearchEnded(Exception):
    """What was looked for."""


def cases(faults: tuple[Fault, ...]) -> st.SearchStrategy[Case]:
    """Cases in which one of these goes wrong."""
    return st.binary(min_size=LONGEST, max_size=LONGEST).map(lambda data: case_from(data, faults))


def broken_by(mutant: Mutant, most: int) -> dict[str, str]:
    """What was seen of a mutant until its property was broken, in at most so many cases."""
    violations_seen: dict[str, str] = {}

    def look(case: Case) -> None:
        if mutant.property in violations_seen:
            raise SearchEnded
        violations_seen.update(violations(case, play(case)))

    with suppress(SearchEnded), mutant.planted():
        each_of(cases(mutant.faults), most, look)
    return violations_seen
