"""Runs properties on subjects, one after the other."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from equipoise.hal.conformance.profile import (
    BRISK_SHARE,
    CASES,
    FAULTS,
    SHRINKING,
    Executor,
    Profile,
)
from equipoise.hal.conformance.property import Pace, Property, Ranks
from equipoise.hal.conformance.result import Finding
from equipoise.hal.conformance.search import Effort, search
from equipoise.hal.conformance.subject import Subject


@dataclass(frozen=True)
class Bout:
    """A property on a subject."""

    claim: Property
    subject: Subject
    executor: Executor


class Watcher(Protocol):
    """Who is told how far the run is."""

    def begin(self, total: int) -> None:
        """So many bouts are to come."""
        ...

    def next(self, bout: Bout) -> None:
        """This one starts."""
        ...

    def found(self, finding: Finding) -> None:
        """It has ended."""
        ...


def bouts(claims: Sequence[Property], subjects: Mapping[Executor, Subject]) -> tuple[Bout, ...]:
    """Which property plays where: groups need ranks, devices by themselves need none."""
    return tuple(
        Bout(claim, subject, executor)
        for claim in claims
        for executor, subject in subjects.items()
        if _fits(claim, executor) and claim.where(subject.traits)
    )


@dataclass(frozen=True)
class How:
    """How hard to look, and from where.

    Attributes:
        profile: minutes or hours.
        seed: what the draws start from.
        cases: how many of each property; None leaves it to the profile.
    """

    profile: Profile
    seed: int
    cases: int | None = None


def conduct(plan: Sequence[Bout], how: How, watcher: Watcher) -> Iterator[Finding]:
    """Play them all; a finding for each as soon as it is known."""
    watcher.begin(len(plan))
    for bout in plan:
        watcher.next(bout)
        finding = _play(bout, effort(bout, how))
        watcher.found(finding)
        yield finding


def effort(bout: Bout, how: How) -> Effort:
    """How hard to look at one property."""
    cases = how.cases or _cases(bout, how.profile)
    return Effort(cases=cases, seed=how.seed, shrinking=SHRINKING[bout.executor])


def _cases(bout: Bout, profile: Profile) -> int:
    if bout.claim.loses is not None:
        return FAULTS[profile][bout.executor]
    cases = CASES[profile][bout.executor]
    if bout.executor is Executor.RANKS and bout.claim.pace is Pace.BRISK:
        return max(1, cases // BRISK_SHARE)
    return cases


def _fits(claim: Property, executor: Executor) -> bool:
    if executor is Executor.VIRTUAL:
        return True
    return (claim.ranks is Ranks.GROUP) == (executor is Executor.RANKS)


def _play(bout: Bout, how: Effort) -> Finding:
    began = time.monotonic()
    verdict = search(bout.claim, bout.subject, how)
    return Finding(
        claim=bout.claim.name,
        family=bout.claim.family,
        clauses=bout.claim.clauses,
        executor=bout.executor.value,
        verdict=verdict,
        seconds=time.monotonic() - began,
    )
