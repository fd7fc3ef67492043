"""What a run of the suite found, property by property and clause by clause."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from equipoise.hal.conformance.clauses import clause_sort_key
from equipoise.hal.conformance.search import (
    PropertyHeld,
    PropertyReported,
    PropertyUnsupported,
    PropertyViolated,
    Verdict,
)


class Status(StrEnum):
    """Status of a clause."""

    HELD = "held"
    VIOLATED = "violated"
    UNSUPPORTED = "unsupported"
    NOT_JUDGED = "not judged"
    REPORTED = "reported"


STATUS_OF_VERDICT: Mapping[type, Status] = {
    PropertyHeld: Status.HELD,
    PropertyReported: Status.REPORTED,
    PropertyViolated: Status.VIOLATED,
    PropertyUnsupported: Status.UNSUPPORTED,
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
    """

    property_name: str
    family: str
    clauses: tuple[str, ...]
    executor: str
    verdict: Verdict
    seconds: float

    @property
    def status(self) -> Status:
        """The verdict in a word."""
        return STATUS_OF_VERDICT[type(self.verdict)]

    def status_for(self, clause: str) -> Status | None:
        """What the finding says of a clause; None when it says nothing."""
        if isinstance(self.verdict, PropertyViolated):
            if self.verdict.clause == clause:
                return Status.VIOLATED
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


STATUS_PRECEDENCE = (
    Status.VIOLATED,
    Status.NOT_JUDGED,
    Status.HELD,
    Status.REPORTED,
    Status.UNSUPPORTED,
)
"""Which status counts when findings differ: the first of these."""


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """One run of the suite.

    Attributes:
        backend: name of the accelerator backend.
        communicator: name of the communicator backend.
        ranks: most ranks that played.
        profile: how hard it looked.
        seed: what the draws started from.
        findings: property by property, executor by executor.
        seconds: of the whole run.
    """

    backend: str
    communicator: str
    ranks: int
    profile: str
    seed: int
    findings: tuple[Finding, ...]
    seconds: float

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

    @property
    def exit_code(self) -> int:
        """0 when no clause is violated, else 1."""
        return int(any(finding.status is Status.VIOLATED for finding in self.findings))

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "backend": self.backend,
            "communicator": self.communicator,
            "ranks": self.ranks,
            "profile": self.profile,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "exit_code": self.exit_code,
            "clauses": {
                clause_finding.clause: {
                    "status": clause_finding.status.value,
                    "cases": clause_finding.cases,
                    "lacking": clause_finding.missing_capabilities,
                    "figures": clause_finding.figures,
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
    }
