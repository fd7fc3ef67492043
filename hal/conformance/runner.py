"""One run of the suite on one backend: which properties on which executors, and their results."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Protocol

from equipoise.hal import registry
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.executors import launched
from equipoise.hal.conformance.executors.controlled import ControlledBackend, ControlledSubject
from equipoise.hal.conformance.executors.device import DeviceSubject
from equipoise.hal.conformance.executors.processes import ProcessSubject
from equipoise.hal.conformance.executors.steering import load_steer
from equipoise.hal.conformance.profile import (
    CASES,
    FAULT_CASES,
    MAX_SHRINKS,
    SHORT_DEADLINE_SHARE,
    Executor,
    Profile,
)
from equipoise.hal.conformance.property import DeadlineLength, Property, PropertyScope
from equipoise.hal.conformance.result import Finding, SuiteResult
from equipoise.hal.conformance.search import SearchSettings, search
from equipoise.hal.conformance.subject import Subject
from equipoise.hal.errors import UsageError


@dataclass(frozen=True)
class PropertyRun:
    """A property on a subject."""

    claim: Property
    subject: Subject
    executor: Executor


class ProgressListener(Protocol):
    """Called with the progress of the run."""

    def begin(self, total: int) -> None:
        """So many bouts are to come."""
        ...

    def next(self, run: PropertyRun) -> None:
        """This one starts."""
        ...

    def found(self, finding: Finding) -> None:
        """It has ended."""
        ...


def plan_runs(
    claims: Sequence[Property], subjects: Mapping[Executor, Subject]
) -> tuple[PropertyRun, ...]:
    """Which property plays where: groups need ranks, devices by themselves need none."""
    return tuple(
        PropertyRun(prop, subject, executor)
        for prop in claims
        for executor, subject in subjects.items()
        if _fits(prop, executor) and prop.applies_to(subject.traits)
    )


@dataclass(frozen=True)
class RunOptions:
    """How hard to look, and from where.

    Attributes:
        profile: minutes or hours.
        seed: what the draws start from.
        cases: how many of each property; None leaves it to the profile.
    """

    profile: Profile
    seed: int
    cases: int | None = None


def run_properties(
    plan: Sequence[PropertyRun], options: RunOptions, watcher: ProgressListener
) -> Iterator[Finding]:
    """Play them all; a finding for each as soon as it is known."""
    watcher.begin(len(plan))
    for bout in plan:
        watcher.next(bout)
        finding = _play(bout, search_settings(bout, options))
        watcher.found(finding)
        yield finding


def search_settings(run: PropertyRun, options: RunOptions) -> SearchSettings:
    """How hard to look at one property."""
    cases = options.cases or _cases(run, options.profile)
    return SearchSettings(cases=cases, seed=options.seed, max_shrinks=MAX_SHRINKS[run.executor])


def _cases(run: PropertyRun, profile: Profile) -> int:
    if run.claim.lost_ranks is not None:
        return FAULT_CASES[profile][run.executor]
    cases = CASES[profile][run.executor]
    if run.executor is Executor.RANKS and run.claim.deadline is DeadlineLength.SHORT:
        return max(1, cases // SHORT_DEADLINE_SHARE)
    return cases


def _fits(prop: Property, executor: Executor) -> bool:
    if executor is Executor.VIRTUAL:
        return True
    return (prop.scope is PropertyScope.GROUP) == (executor is Executor.RANKS)


def _play(run: PropertyRun, settings: SearchSettings) -> Finding:
    began = time.monotonic()
    verdict = search(run.claim, run.subject, settings)
    return Finding(
        property_name=run.claim.name,
        family=run.claim.family,
        clauses=run.claim.clauses,
        executor=run.executor.value,
        verdict=verdict,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, kw_only=True)
class ConformanceRun:
    """What is to be run.

    Attributes:
        backend: accelerator backend, by name or as PACKAGE:OBJECT.
        communicator: communicator backend, likewise.
        ranks: most processes to play on, where the suite starts them itself.
        profile: how hard to look.
        families: which properties.
        seed: what the draws start from.
        cases: how many of each property, where the profile is not to say so.
        steer: receives the schedule of each case, as PACKAGE:OBJECT; then one device by itself
            is played, since a schedule is chosen within a process.
        library: the expert-parallel library that is judged, by name or as PACKAGE:OBJECT.
    """

    backend: str
    communicator: str
    ranks: int
    profile: Profile
    families: tuple[str, ...]
    seed: int
    cases: int | None = None
    steer: str | None = None
    library: str | None = None

    def run(self, watcher: ProgressListener) -> SuiteResult | None:
        """Play everything; None on ranks that a launcher started and that are not the first.

        Raises:
            BackendUnavailable: a backend is unknown, or cannot run here.
            UsageError: the device cannot be steered.
        """
        rendezvous = registry.communicator(self.communicator).launcher_rendezvous()
        if rendezvous is not None and self.steer is not None:
            raise UsageError("a device is steered in one process, not in the ranks of a launch")
        if rendezvous is not None and rendezvous.rank > 0:
            launched.serve_rank(self.backend, self.communicator, rendezvous, self.library)
            return None
        began = time.monotonic()
        with self.subjects(rendezvous) as subjects:
            plan = plan_runs(self.properties(), subjects)
            how = RunOptions(self.profile, self.seed, self.cases)
            findings = tuple(run_properties(plan, how, watcher))
            most = max(size for subject in subjects.values() for size in subject.traits.group_sizes)
        return SuiteResult(
            backend=self.backend,
            communicator=self.communicator,
            ranks=most,
            profile=self.profile.value,
            seed=self.seed,
            findings=findings,
            seconds=time.monotonic() - began,
        )

    def properties(self) -> list[Property]:
        """The properties of the families asked for, in the suite's order."""
        return [prop for prop in suite.properties() if prop.family in self.families]

    @contextmanager
    def subjects(self, rendezvous: Rendezvous | None) -> Iterator[Mapping[Executor, Subject]]:
        """The executors that fit the backend, closed at the end."""
        with ExitStack() as stack:
            subjects = self._subjects(rendezvous)
            for subject in subjects.values():
                stack.enter_context(closing(subject))
            yield subjects

    def _subjects(self, rendezvous: Rendezvous | None) -> dict[Executor, Subject]:
        backend = registry.accelerator(self.backend)
        if isinstance(backend, ControlledBackend):
            library = registry.expert_parallel(self.library) if self.library else None
            return {Executor.VIRTUAL: ControlledSubject(backend, library)}
        if self.steer is not None:
            return {Executor.DEVICE: DeviceSubject(backend, load_steer(self.steer))}
        ranks: Subject
        if rendezvous is None:
            ranks = ProcessSubject(
                self.backend, self.communicator, self.ranks, library=self.library
            )
        else:
            ranks = launched.LaunchedSubject(
                self.backend, self.communicator, rendezvous, library=self.library
            )
        return {Executor.DEVICE: DeviceSubject(backend), Executor.RANKS: ranks}
