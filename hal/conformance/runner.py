"""One run of the suite on one backend: which properties on which executors, and their results."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from equipoise.hal import registry
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.conformance import suite
from equipoise.hal.conformance.clauses import CLOSING, HANG, LEVELS, METHODS, SIGNATURES, Level
from equipoise.hal.conformance.executors import launched
from equipoise.hal.conformance.executors.controlled import ControlledBackend, ControlledSubject
from equipoise.hal.conformance.executors.device import DeviceSubject
from equipoise.hal.conformance.executors.processes import ProcessSubject
from equipoise.hal.conformance.executors.steering import load_steer
from equipoise.hal.conformance.expected_violations import Expectation
from equipoise.hal.conformance.profile import (
    CASES,
    FAULT_CASES,
    MAX_EXPIRED_PLAYS,
    MAX_EXPIRED_SHRINKS,
    MAX_HUNG_PROPERTIES,
    MAX_SHRINKS,
    SHORT_DEADLINE_SHARE,
    Executor,
    Profile,
    RunTarget,
    families_of,
)
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import (
    DeadlineLength,
    Property,
    PropertyScope,
    Traits,
    lock_support,
)
from equipoise.hal.conformance.result import Finding, Status, SuiteResult
from equipoise.hal.conformance.search import (
    PropertyNotJudged,
    PropertyViolated,
    SearchSettings,
    Verdict,
    search,
)
from equipoise.hal.conformance.subject import Subject, missing_capability
from equipoise.hal.errors import ClosingFailed, UsageError

LOCK_LETTER = "L"
"""Of the clauses of the stream lock."""
MISSING_MEMBERS = (
    re.compile(r"(\w+)(?: for \w+:)? has no (?!attribute)(\w+)"),
    re.compile(r"'(\w+)' object has no attribute '(\w+)'"),
)
"""A class and what it lacks, as violations of signatures say it, and as Python does."""


@dataclass(frozen=True)
class PropertyRun:
    """A property on a subject."""

    claim: Property
    subject: Subject
    executor: Executor


class ProgressListener(Protocol):
    """Called with the progress of the run."""

    def begin(self, total: int) -> None:
        """So many properties are to be played."""
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
        expectations: violations that are known.
    """

    profile: Profile
    seed: int
    cases: int | None = None
    expectations: tuple[Expectation, ...] = ()


def run_properties(
    plan: Sequence[PropertyRun], options: RunOptions, watcher: ProgressListener
) -> Iterator[Finding]:
    """Play them all; a finding for each as soon as it is known.

    Nothing else is played on an expert-parallel library whose groups lack methods: every property
    would say so again.
    """
    watcher.begin(len(plan))
    earlier: list[Finding] = []
    for run in plan:
        watcher.next(run)
        finding = play_property(run, options, earlier)
        found = [finding]
        if finding.only_closing:  # of the property's own clauses nothing is known yet
            again = play_property(run, options, [*earlier, finding])
            found = [replace(finding, clauses=(CLOSING,)), again]
        for each in found:
            marked = _marked(each, options.expectations)
            earlier.append(marked)
            watcher.found(marked)
            yield marked
        if finding.status_for(METHODS) in (Status.VIOLATED, Status.EXPECTED):
            return


def search_settings(
    run: PropertyRun, options: RunOptions, earlier: Sequence[Finding] = ()
) -> SearchSettings:
    """How hard to look at one property, after what was found before."""
    profile = options.profile
    left = MAX_EXPIRED_PLAYS[profile] - sum(v.expired_plays for v in _violations(earlier))
    return SearchSettings(
        cases=options.cases or _cases(run, profile),
        seed=options.seed,
        max_shrinks=MAX_SHRINKS[run.executor],
        max_expired_shrinks=min(MAX_EXPIRED_SHRINKS[profile], max(0, left)),
    )


def _violations(findings: Iterable[Finding]) -> list[PropertyViolated]:
    verdicts = (finding.verdict for finding in findings)
    return [verdict for verdict in verdicts if isinstance(verdict, PropertyViolated)]


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


def _marked(finding: Finding, expectations: Sequence[Expectation]) -> Finding:
    """The finding, with the expectation that covers its violation, if there is one."""
    if not isinstance(finding.verdict, PropertyViolated):
        return finding
    covering = (e for e in expectations if e.covers(finding.property_name, finding.verdict.clause))
    return replace(finding, expectation=next(covering, None))


def play_property(run: PropertyRun, options: RunOptions, earlier: Sequence[Finding]) -> Finding:
    """Play one property, unless what was found earlier in the run says that it can show nothing."""
    began = time.monotonic()
    verdict: Verdict | None = _hung_before(run, options.profile, earlier)
    if verdict is None:
        subject = run.subject
        if any(finding.only_closing for finding in earlier):
            subject = _ClosingReported(subject)
        found = search(run.claim, subject, search_settings(run, options, earlier))
        verdict = _reported_before(found, earlier) or found
    return Finding(
        property_name=run.claim.name,
        family=run.claim.family,
        clauses=_judged_clauses(run.claim, run.subject.traits),
        executor=run.executor.value,
        verdict=verdict,
        seconds=time.monotonic() - began,
    )


class _ClosingReported:
    """A subject whose communicators fail to close, which was reported for an earlier property."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.name, self.traits, self.close = subject.name, subject.traits, subject.close

    def play(self, prop: Property, case: Case) -> str | None:
        """Play a case, which holds if everything but the closing does."""
        try:
            return self._subject.play(prop, case)
        except ClosingFailed:
            return None


def _hung_before(
    run: PropertyRun, profile: Profile, earlier: Sequence[Finding]
) -> PropertyNotJudged | None:
    """That ranks have hung too often for a further property on them to be worth the wait."""
    hung = [
        finding.property_name
        for finding in earlier
        if run.executor is Executor.RANKS
        and finding.executor == run.executor
        and any(v.clause == HANG and v.expired_plays for v in _violations([finding]))
    ]
    if len(hung) < MAX_HUNG_PROPERTIES[profile] or missing_capability(
        run.claim, run.subject.traits
    ):
        return None
    return PropertyNotJudged(f"ranks hung in {len(hung)} properties before ({HANG})")


def _reported_before(verdict: Verdict, earlier: Sequence[Finding]) -> PropertyNotJudged | None:
    """A violation that is only a missing method, and was reported for an earlier property."""
    if not isinstance(verdict, PropertyViolated):
        return None
    reported = {
        member
        for violation in _violations(earlier)
        if violation.clause == SIGNATURES
        for member in _missing_members(violation)
    }
    missing = _missing_members(verdict)
    if not missing or not reported.issuperset(missing):
        return None
    return PropertyNotJudged(
        "; ".join(f"{kind} has no {name} ({SIGNATURES})" for kind, name in missing)
    )


def _missing_members(violation: PropertyViolated) -> list[tuple[str, str]]:
    return [member for pattern in MISSING_MEMBERS for member in pattern.findall(violation.what)]


def _judged_clauses(prop: Property, traits: Traits) -> tuple[str, ...]:
    """The clauses that a property judges on a subject.

    A property about more than the stream lock goes on without one, and then says nothing of it.
    """
    if missing_capability(prop, traits) or lock_support(traits) is None:
        return prop.clauses
    return tuple(clause for clause in prop.clauses if not clause.startswith(LOCK_LETTER))


@dataclass(frozen=True, kw_only=True)
class ConformanceRun:
    """What is to be run.

    Attributes:
        backend: accelerator backend, by name or as PACKAGE:OBJECT.
        communicator: communicator backend, likewise; empty to judge one device by itself.
        ranks: most processes to play on, where the suite starts them itself.
        profile: how hard to look.
        families: which properties.
        seed: what the draws start from.
        cases: how many of each property, where the profile is not to say so.
        levels: which properties, of these families.
        expectations: violations that are known.
        target: what is judged: the backend, its communicator alone, or a library on it.
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
    levels: tuple[Level, ...] = tuple(Level)
    expectations: tuple[Expectation, ...] = ()
    target: RunTarget = RunTarget.BACKEND
    library: str | None = None

    def run(self, watcher: ProgressListener) -> SuiteResult | None:
        """Play everything; None on ranks that a launcher started and that are not the first.

        Where it is interrupted, by Ctrl-C or a signal that raises, the result is that of the
        properties which had ended, and holds what was raised.

        Raises:
            BackendUnavailable: a backend is unknown, or cannot run here.
            UsageError: the device cannot be steered.
        """
        rendezvous = None
        if self.communicator:
            rendezvous = registry.communicator(self.communicator).launcher_rendezvous()
        if rendezvous is not None and self.steer is not None:
            raise UsageError("a device is steered in one process, not in the ranks of a launch")
        if rendezvous is not None and rendezvous.rank > 0:
            launched.serve_rank(self.backend, self.communicator, rendezvous, self.library)
            return None
        began = time.monotonic()
        findings: list[Finding] = []
        interruption: BaseException | None = None
        with self.subjects(rendezvous) as subjects:
            plan = plan_runs(self.properties(), subjects)
            if not plan:
                raise UsageError(
                    f"no property of the families {', '.join(self.families)} and the levels "
                    f"{', '.join(self.levels)} judges {self.subject_name}: ask for others"
                )
            options = RunOptions(self.profile, self.seed, self.cases, self.expectations)
            try:
                for finding in run_properties(plan, options, watcher):
                    findings.append(finding)
            except Exception:
                raise  # a fault of the suite, or bad input: there is no result to save
            except BaseException as error:
                # KeyboardInterrupt, or the exit that a signal asks for: the caller raises it again
                # when it has printed and written what was found in minutes of playing.
                interruption = error
            possible = plan_runs(self._possible_properties(), subjects)
            played = {finding.property_name for finding in findings}
            partial_levels = _levels(possible, played)
            max_ranks = max(
                size for subject in subjects.values() for size in subject.traits.group_sizes
            )
        return SuiteResult(
            backend=self.backend,
            communicator=self.communicator,
            target=self.target,
            library=self.library,
            ranks=max_ranks,
            profile=self.profile.value,
            seed=self.seed,
            findings=tuple(findings),
            seconds=time.monotonic() - began,
            partial_levels=partial_levels,
            steer=self.steer,
            launcher="" if rendezvous is None else f"mpiexec -n {rendezvous.size}",
            expectations=self.expectations,
            interruption=interruption,
        )

    @property
    def subject_name(self) -> str:
        """What is judged, by name."""
        return self.library or (
            self.communicator if self.target is RunTarget.COMMUNICATOR else self.backend
        )

    def properties(self) -> list[Property]:
        """The properties of the families and levels asked for, in the suite's order.

        Those of signatures come first: of a method that is missing they say so, while others only
        say what raised. What has no level is measured, not judged: it is left out where levels are
        chosen.
        """
        every_level = set(self.levels) == set(Level)
        return [
            prop
            for prop in sorted(suite.properties(), key=lambda prop: SIGNATURES not in prop.clauses)
            if prop.family in self.families
            and (every_level or LEVELS.get(prop.clauses[0]) in self.levels)
        ]

    def _possible_properties(self) -> list[Property]:
        """The properties that what is judged can be judged by, whatever was asked for."""
        families = families_of(self.target)
        return [prop for prop in suite.properties() if prop.family in families]

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
        executors: tuple[Executor, ...] = (Executor.DEVICE, Executor.RANKS)
        if isinstance(backend, ControlledBackend):
            executors = (Executor.VIRTUAL,)
        elif self.steer is not None or not self.communicator:
            executors = (Executor.DEVICE,)
        elif self.target is not RunTarget.BACKEND:
            executors = (Executor.RANKS,)
        place = SubjectPlace(self.backend, self.communicator, self.ranks, self.steer, self.library)
        return {executor: open_subject(executor, place, rendezvous) for executor in executors}


@dataclass(frozen=True)
class SubjectPlace:
    """What is under test, by name, on how many ranks at most, and what receives schedules.

    `library` is the expert-parallel library that is judged, if one is.
    """

    backend: str
    communicator: str
    ranks: int
    steer: str | None = None
    library: str | None = None


def open_subject(executor: Executor, place: SubjectPlace, rendezvous: Rendezvous | None) -> Subject:
    """The subject of one executor; `rendezvous` is that of a launcher which started the ranks.

    Raises:
        BackendUnavailable: a backend is unknown, or cannot run here.
        UsageError: the device cannot be steered, or its schedule cannot be chosen.
    """
    if executor is Executor.RANKS:
        if rendezvous is None:
            return ProcessSubject(
                place.backend, place.communicator, place.ranks, library=place.library
            )
        return launched.LaunchedSubject(
            place.backend, place.communicator, rendezvous, library=place.library
        )
    backend = registry.accelerator(place.backend)
    if executor is Executor.DEVICE:
        return DeviceSubject(backend, None if place.steer is None else load_steer(place.steer))
    if not isinstance(backend, ControlledBackend):
        raise UsageError(f"{place.backend} has no schedule that can be chosen")
    library = registry.expert_parallel(place.library) if place.library else None
    return ControlledSubject(backend, library)


def _levels(possible: Sequence[PropertyRun], played: Set[str]) -> frozenset[Level]:
    """The levels of the properties that could be played and are not, by name."""
    omitted = (run.claim for run in possible if run.claim.name not in played)
    return frozenset(LEVELS[prop.clauses[0]] for prop in omitted if prop.clauses[0] in LEVELS)
