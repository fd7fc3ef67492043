"""Which properties a run plays, and what it says of the levels that it plays in part."""

import dataclasses

import pytest

from equipoise.hal.conformance.clauses import LEVELS, Level
from equipoise.hal.conformance.profile import Profile
from equipoise.hal.conformance.property import Property
from equipoise.hal.conformance.result import Finding, LevelStatus
from equipoise.hal.conformance.runner import ConformanceRun, PropertyRun

ELASTIC = ("failures",)
RUN = ConformanceRun(
    backend="virtual",
    communicator="virtual",
    ranks=2,
    profile=Profile.CI,
    families=ELASTIC,
    seed=0,
    cases=1,
)


class Unwatched:
    """Watches nothing."""

    def begin(self, total: int) -> None:
        pass

    def next(self, run: PropertyRun) -> None:
        pass

    def found(self, finding: Finding) -> None:
        pass


def level_of(prop: Property) -> Level | None:
    return LEVELS.get(prop.clauses[0])


@pytest.mark.parametrize("level", Level)
def test_level_chooses_its_properties_of_the_families(level: Level) -> None:
    chosen = dataclasses.replace(RUN, levels=(level,)).properties()
    assert chosen == [prop for prop in RUN.properties() if level_of(prop) is level]


def test_level_is_judged_when_its_properties_are_played() -> None:
    run = dataclasses.replace(RUN, levels=(Level.ELASTIC,))
    result = run.run(Unwatched())
    assert result is not None
    statuses = {finding.level: finding.status for finding in result.levels()}
    assert statuses.pop(Level.ELASTIC) is LevelStatus.KEPT
    assert set(statuses.values()) == {LevelStatus.NOT_JUDGED}


def test_signatures_are_judged_first() -> None:
    every = dataclasses.replace(RUN, families=("ordering", "resources")).properties()
    assert [prop.clauses for prop in every[:2]] == [("R3",), ("R3",)]
    assert "R3" not in {clause for prop in every[2:] for clause in prop.clauses}


def test_level_is_not_judged_when_a_family_of_it_is_left_out() -> None:
    """What was played of it held; the rest was not asked for."""
    run = dataclasses.replace(RUN, families=("timeouts",), levels=(Level.FAULT,))
    result = run.run(Unwatched())
    assert result is not None
    [fault] = [finding for finding in result.levels() if finding.level is Level.FAULT]
    assert fault.findings
    assert fault.status is LevelStatus.NOT_JUDGED
