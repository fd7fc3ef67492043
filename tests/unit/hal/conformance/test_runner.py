"""Which properties a run plays, and what it says of the levels that it plays in part."""

import dataclasses

import pytest
from helpers.fakes.null_progress_listener import NullProgressListener

from equipoise.hal.capabilities import Capabilities, CommunicatorCapabilities
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import LEVELS, Level
from equipoise.hal.conformance.profile import MAX_EXPIRED_PLAYS, Executor, Profile
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.result import Finding, LevelStatus, Status
from equipoise.hal.conformance.runner import (
    ConformanceRun,
    PropertyRun,
    RunOptions,
    plan_runs,
    play_property,
    run_properties,
)
from equipoise.hal.conformance.search import PropertyNotJudged
from equipoise.hal.conformance.subject import Subject, missing_capability
from equipoise.hal.errors import UsageError, Violation

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


def level_of(prop: Property) -> Level | None:
    return LEVELS.get(prop.clauses[0])


@pytest.mark.parametrize("level", Level)
def test_level_chooses_its_properties_of_the_families(level: Level) -> None:
    chosen = dataclasses.replace(RUN, levels=(level,)).properties()
    assert chosen == [prop for prop in RUN.properties() if level_of(prop) is level]


def test_level_is_judged_when_its_properties_are_played() -> None:
    run = dataclasses.replace(RUN, levels=(Level.ELASTIC,))
    result = run.run(NullProgressListener())
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
    result = run.run(NullProgressListener())
    assert result is not None
    [fault] = [finding for finding in result.levels() if finding.level is Level.FAULT]
    assert fault.findings
    assert fault.status is LevelStatus.NOT_JUDGED


HELD_FIRST = 2
"""So that what breaks is no smallest program yet."""


class Ending:
    """Ranks on which every case ends with the same violation, save the first few, which hold."""

    name = "ending"
    traits = Traits(Capabilities(), CommunicatorCapabilities(), (1, 2), controlled=False)

    def __init__(self, clause: str, what: str, expired: bool = False) -> None:
        self._violation = clause, what, expired
        self._cases: dict[str, int] = {}
        self.plays = 0

    def play(self, prop: Property, case: Case) -> None:
        self._cases[prop.name] = self._cases.get(prop.name, 0) + 1
        if self._cases[prop.name] <= HELD_FIRST:
            return
        self.plays += 1
        clause, what, expired = self._violation
        violation = Violation(clause, what)
        violation.expired = expired
        raise violation

    def close(self) -> None:
        pass


def findings_on(subject: Subject, count: int, profile: Profile = Profile.CI) -> list[Finding]:
    """What the first properties of the suite that play on ranks say of it."""
    claims = [prop for prop in suite.properties() if not missing_capability(prop, subject.traits)]
    plan = plan_runs(claims, {Executor.RANKS: subject})[:count]
    assert len(plan) == count
    return list(run_properties(plan, RunOptions(profile, seed=0), NullProgressListener()))


def test_ranks_that_hang_are_judged_by_few_properties_and_few_plays() -> None:
    hanging = Ending("C8", "no answer within 40 s from rank 1", expired=True)
    found = findings_on(hanging, 8)
    assert [finding.status for finding in found] == [Status.VIOLATED] * 3 + [Status.NOT_JUDGED] * 5
    reason = "ranks hung in 3 properties before (C8)"
    assert {finding.verdict for finding in found[3:]} == {PropertyNotJudged(reason)}
    assert hanging.plays <= 3 + MAX_EXPIRED_PLAYS[Profile.CI]


def test_violations_that_wait_for_deadlines_are_shrunk_until_run_has_waited_enough() -> None:
    """Every property is judged; the later ones report the case as it was drawn."""
    slow = Ending("K2", "an operation passed its deadline", expired=True)
    found = findings_on(slow, 8)
    assert {finding.status for finding in found} == {Status.VIOLATED}
    assert slow.plays <= 8 + MAX_EXPIRED_PLAYS[Profile.CI]
    quick = Ending("K2", "wrong bytes")
    findings_on(quick, 8)
    assert quick.plays > slow.plays


@pytest.mark.parametrize(
    ("clause", "what"),
    [
        ("R3", "rank 0: VendorGroup has no irecv"),
        ("A8", "AttributeError: 'VendorGroup' object has no attribute 'irecv', not a SlotError"),
    ],
)
def test_missing_method_is_told_once(clause: str, what: str) -> None:
    told = findings_on(Ending("R3", "VendorGroup for Communicator: has no irecv"), 1)
    prop = suite.find("layouts-are-copied-right-or-rejected")
    options = RunOptions(Profile.CI, seed=0)
    [run] = plan_runs([prop], {Executor.RANKS: Ending(clause, what)})
    assert play_property(run, options, told).verdict == PropertyNotJudged(
        "VendorGroup has no irecv (R3)"
    )
    [run] = plan_runs([prop], {Executor.RANKS: Ending(clause, what.replace("irecv", "abort"))})
    assert play_property(run, options, told).status is Status.VIOLATED


def test_run_that_judges_nothing_is_bad_input() -> None:
    """It would end with 0, and "the contract is kept"."""
    nothing = dataclasses.replace(RUN, families=("overlap",), levels=(Level.ELASTIC,))
    with pytest.raises(UsageError, match="no property of the families overlap and the levels ela"):
        nothing.run(NullProgressListener())


def test_interrupted_run_keeps_findings_of_properties_that_ended() -> None:
    class Interrupting(NullProgressListener):
        """Interrupts the second property."""

        begun = 0

        def next(self, run: PropertyRun) -> None:
            self.begun += 1
            if self.begun == 2:
                raise KeyboardInterrupt

    run = dataclasses.replace(RUN, levels=(Level.ELASTIC,))
    result = run.run(Interrupting())
    assert result is not None
    assert isinstance(result.interruption, KeyboardInterrupt)
    assert len(result.findings) == 1
    [elastic] = [finding for finding in result.levels() if finding.level is Level.ELASTIC]
    assert elastic.status is LevelStatus.NOT_JUDGED
