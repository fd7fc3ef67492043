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


def conduct(
    plan: Sequence[Bout], profile: Profile, seed: int, watcher: Watcher
) -> Iterator[Finding]:
    """Play them all; a finding for each as soon as it is known."""
    watcher.begin(len(plan))
    for bout in plan:
        watcher.next(bout)
        finding = _play(bout, effort(bout, profile, seed))
        watcher.found(finding)
        yield finding


def effort(bout: Bout, profile: Profile, seed: int) -> Effort:
    """How hard to look at one property."""
    cases = CASES[profile][bout.executor]
    if bout.claim.loses is not None:
        cases = FAULTS[profile][bout.executor]
    elif bout.executor is Executor.RANKS and bout.claim.pace is Pace.BRISK:
        cases = max(1, cases // BRISK_SHARE)
    return Effort(cases=cases, seed=seed, shrinking=SHRINKING[bout.executor])


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
