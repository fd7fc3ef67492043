"""What a run of the suite found, property by property and clause by clause."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from equipoise.hal.conformance.clauses import LEVELS, Level, clause_sort_key
from equipoise.hal.conformance.expected_violations import Expectation, Shows
from equipoise.hal.conformance.profile import RunTarget
from equipoise.hal.conformance.program import case_to_json
from equipoise.hal.conformance.search import (
    PropertyHeld,
    PropertyNotJudged,
    PropertyReported,
    PropertyUnsupported,
    PropertyViolated,
    Verdict,
)


class Status(StrEnum):
    """Status of a clause."""

    HELD = "held"
    VIOLATED = "violated"
    EXPECTED = "expected"
    """Violated, as the file of expected violations says."""
    UNSUPPORTED = "unsupported"
    NOT_JUDGED = "not judged"
    REPORTED = "reported"


STATUS_OF_VERDICT: Mapping[type, Status] = {
    PropertyHeld: Status.HELD,
    PropertyReported: Status.REPORTED,
    PropertyViolated: Status.VIOLATED,
    PropertyUnsupported: Status.UNSUPPORTED,
    PropertyNotJudged: Status.NOT_JUDGED,
}
"""What a verdict is called."""


@dataclass(frozen=True)
class Finding:
    """One property on one executor.

    Attributes:
        property_name: name of the property.
        family: its family.
        clauses: what it judges.
        executor: where it was played.
        verdict: how it ended.
        seconds: how long it took.
        expectation: what covers the violation, where it is an expected one.
    """

    property_name: str
    family: str
    clauses: tuple[str, ...]
    executor: str
    verdict: Verdict
    seconds: float
    expectation: Expectation | None = None

    @property
    def status(self) -> Status:
        """The verdict in a word."""
        if self.expectation is not None:
            return Status.EXPECTED
        return STATUS_OF_VERDICT[type(self.verdict)]

    @property
    def only_closing(self) -> bool:
        """Whether everything held but the closing of communicators: a finding beside the own."""
        return isinstance(self.verdict, PropertyViolated) and self.verdict.only_closing

    @property
    def level(self) -> Level | None:
        """The level of the property."""
        return LEVELS.get(self.clauses[0])

    def status_for(self, clause: str) -> Status | None:
        """What the finding says of a clause; None when it says nothing."""
        if isinstance(self.verdict, PropertyViolated):
            if self.verdict.clause == clause:
                return self.status
            return Status.NOT_JUDGED if clause in self.clauses else None
        return self.status if clause in self.clauses else None

    def to_json(self) -> dict[str, Any]:
        """As JSON; a violation with its program."""
        fields = {
            "property": self.property_name,
            "family": self.family,
            "clauses": list(self.clauses),
            "executor": self.executor,
            "status": self.status.value,
            "seconds": round(self.seconds, 3),
        }
        if self.expectation is not None:
            fields["expected"] = {"reason": self.expectation.reason, "link": self.expectation.link}
        return fields | _detail(self.verdict)


@dataclass(frozen=True)
class ClauseFinding:
    """What all properties together say of one clause."""

    clause: str
    status: Status
    findings: tuple[Finding, ...]

    @property
    def cases(self) -> int:
        """How many cases were played for it without a violation."""
        verdicts = [finding.verdict for finding in self.findings]
        return sum(verdict.cases for verdict in verdicts if isinstance(verdict, PropertyHeld))

    @property
    def figures(self) -> str:
        """What was measured, in words, or nothing."""
        verdicts = [finding.verdict for finding in self.findings]
        return "; ".join(
            verdict.figure for verdict in verdicts if isinstance(verdict, PropertyReported)
        )

    @property
    def missing_capabilities(self) -> str:
        """The capability for want of which it was not judged, or nothing."""
        verdicts = [finding.verdict for finding in self.findings]
        names = {
            verdict.capability for verdict in verdicts if isinstance(verdict, PropertyUnsupported)
        }
        return ", ".join(sorted(names))

    @property
    def obstacles(self) -> str:
        """Why properties that judge it were not played, or nothing."""
        verdicts = [finding.verdict for finding in self.findings]
        reasons = [v.reason for v in verdicts if isinstance(v, PropertyNotJudged)]
        return "; ".join(dict.fromkeys(reasons))


STATUS_PRECEDENCE = (
    Status.VIOLATED,
    Status.EXPECTED,
    Status.NOT_JUDGED,
    Status.HELD,
    Status.REPORTED,
    Status.UNSUPPORTED,
)
"""Which status counts when findings differ: the first of these."""


class LevelStatus(StrEnum):
    """Status of a level."""

    KEPT = "kept"
    """Each of its clauses is held or declared unsupported, and one is held."""
    NOT_KEPT = "not kept"
    NOT_DECLARED = "not declared"
    """Nothing of it is declared."""
    NOT_JUDGED = "not judged"
    """Nothing of it is violated, but some of its properties were not asked for."""


@dataclass(frozen=True)
class LevelFinding:
    """What a run says of a level.

    Attributes:
        level: the level.
        status: whether it is kept.
        findings: its clauses.
    """

    level: Level
    status: LevelStatus
    findings: tuple[ClauseFinding, ...]

    def clauses(self, *statuses: Status) -> list[str]:
        """Its clauses that ended so."""
        return [finding.clause for finding in self.findings if finding.status in statuses]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "status": self.status.value,
            "violated": self.clauses(Status.VIOLATED, Status.EXPECTED),
            "not_judged": self.clauses(Status.NOT_JUDGED),
            "not_declared": self.clauses(Status.UNSUPPORTED),
        }


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """One run of the suite.

    Attributes:
        backend: name of the accelerator backend.
        communicator: name of the communicator backend.
        target: what is judged: the backend, its communicator alone, or a library on it.
        ranks: most ranks that played.
        profile: how hard it looked.
        seed: what the draws started from.
        findings: property by property, executor by executor.
        seconds: of the whole run.
        partial_levels: levels of which a property that the backend can play was not asked for.
        expectations: violations that are known.
        steer: what received the schedule of each case, as PACKAGE:OBJECT.
        launcher: what a command needs before it where a launcher started the ranks, or nothing.
        interruption: what ended the run before all properties were played, or None.
    """

    backend: str
    communicator: str
    ranks: int
    profile: str
    seed: int
    findings: tuple[Finding, ...]
    seconds: float
    partial_levels: frozenset[Level] = frozenset()
    expectations: tuple[Expectation, ...] = ()
    target: RunTarget = RunTarget.BACKEND
    library: str | None = None
    steer: str | None = None
    launcher: str = ""
    interruption: BaseException | None = None

    @property
    def subject(self) -> str:
        """What is judged, by name."""
        if self.target is RunTarget.LIBRARY:
            return f"{self.library} (on {self.backend} with {self.communicator})"
        if self.target is RunTarget.COMMUNICATOR:
            return f"{self.communicator} (on {self.backend})"
        if not self.communicator:
            return f"{self.backend} by itself"
        return f"{self.backend} with {self.communicator}"

    def clauses(self) -> tuple[ClauseFinding, ...]:
        """Clause by clause, in the order of the contract."""
        judged_clauses = {clause for finding in self.findings for clause in finding.clauses}
        broken = {
            v.clause for v in (f.verdict for f in self.findings) if isinstance(v, PropertyViolated)
        }
        return tuple(
            combine_findings(clause, self.findings)
            for clause in sorted(judged_clauses | broken, key=clause_sort_key)
        )

    def count(self, status: Status) -> int:
        """How many clauses ended so."""
        return sum(finding.status is status for finding in self.clauses())

    def levels(self) -> tuple[LevelFinding, ...]:
        """Level by level. A violation counts whoever found it; a clause is judged, and for want of
        a capability not judged, by the properties of its own level."""
        return tuple(self._level(level) for level in Level)

    def _level(self, level: Level) -> LevelFinding:
        broken = (Status.VIOLATED, Status.EXPECTED)
        own = [finding for finding in self.findings if finding.level is level]
        clauses = [clause for clause in self.clauses() if LEVELS.get(clause.clause) is level]
        found = tuple(
            clause if clause.status in broken else combine_findings(clause.clause, own)
            for clause in clauses
            if clause.status in broken
            or any(finding.status_for(clause.clause) is not None for finding in own)
        )
        statuses = {clause.status for clause in found}
        if statuses & {*broken, Status.NOT_JUDGED}:
            status = LevelStatus.NOT_KEPT
        elif level in self.partial_levels or not found:
            status = LevelStatus.NOT_JUDGED
        else:
            status = LevelStatus.KEPT if Status.HELD in statuses else LevelStatus.NOT_DECLARED
        return LevelFinding(level, status, found)

    def unexpected_passes(self, shows: Shows) -> list[Expectation]:
        """Expected violations that did not show, though their clause was judged and held."""
        held = {clause.clause for clause in self.clauses() if clause.status is Status.HELD}
        held_by = {
            (finding.property_name, clause)
            for finding in self.findings
            if finding.status is Status.HELD
            for clause in finding.clauses
        }
        return [
            expected
            for expected in self.expectations
            if expected.shows is shows
            and (
                (expected.property, expected.clause) in held_by
                if expected.property
                else expected.clause in held
            )
        ]

    @property
    def exit_code(self) -> int:
        """1 when a clause is violated that is not expected to be, or held that is, or when a
        property could not be judged; else 0."""
        statuses = (Status.VIOLATED, Status.NOT_JUDGED)
        failed = any(finding.status in statuses for finding in self.findings)
        return int(failed or bool(self.unexpected_passes(Shows.ALWAYS)))

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "backend": self.backend,
            "communicator": self.communicator,
            "target": self.target.value,
            "library": self.library,
            "ranks": self.ranks,
            "profile": self.profile,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "exit_code": None if self.interruption else self.exit_code,
            "interrupted": self.interruption is not None,
            "levels": {finding.level.value: finding.to_json() for finding in self.levels()},
            "unexpected_passes": [
                str(expected) for shows in Shows for expected in self.unexpected_passes(shows)
            ],
            "clauses": {
                clause_finding.clause: {
                    "status": clause_finding.status.value,
                    "cases": clause_finding.cases,
                    "lacking": clause_finding.missing_capabilities,
                    "figures": clause_finding.figures,
                    "reason": clause_finding.obstacles,
                }
                for clause_finding in self.clauses()
            },
            "properties": [finding.to_json() for finding in self.findings],
        }


def combine_findings(clause: str, findings: Sequence[Finding]) -> ClauseFinding:
    """What `findings` together say of `clause`."""
    statuses = [(finding, finding.status_for(clause)) for finding in findings]
    relevant = tuple(finding for finding, status in statuses if status is not None)
    statuses_present = {status for _, status in statuses if status is not None}
    return ClauseFinding(
        clause, next(s for s in STATUS_PRECEDENCE if s in statuses_present), relevant
    )


def _detail(verdict: Verdict) -> dict[str, Any]:
    if isinstance(verdict, PropertyUnsupported):
        return {"capability": verdict.capability}
    if isinstance(verdict, PropertyNotJudged):
        return {"reason": verdict.reason}
    if isinstance(verdict, PropertyHeld):
        return {"cases": verdict.cases}
    if isinstance(verdict, PropertyReported):
        return {"figure": verdict.figure}
    return {
        "cases": verdict.cases,
        "clause": verdict.clause,
        "what": verdict.what,
        "program": verdict.case.program.lines(),
        "steps": len(verdict.case.program.steps),
        "schedule": verdict.case.schedule.hex(),
        "case": case_to_json(verdict.case),
    }
