"""One run of the suite on one backend: which executors, which properties, what came of it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from equipoise.hal import registry
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.conformance import launched, suite
from equipoise.hal.conformance.conduct import How, Watcher, bouts, conduct
from equipoise.hal.conformance.controlled import ControlledBackend
from equipoise.hal.conformance.device import DeviceSubject
from equipoise.hal.conformance.processes import ProcessSubject
from equipoise.hal.conformance.profile import Executor, Profile
from equipoise.hal.conformance.property import Property
from equipoise.hal.conformance.result import Result
from equipoise.hal.conformance.steering import steering
from equipoise.hal.conformance.subject import Subject
from equipoise.hal.conformance.virtual import ControlledSubject
from equipoise.hal.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What is to be run.

    Attributes:
        backend: accelerator backend, by name or as PACKAGE:OBJECT.
        communicator: communicator backend, likewise.
        ranks: most processes to play on, where the suite starts them itself.
        profile: how hard to look.
        families: which properties.
        seed: what the draws start from.
        cases: how many of each property, where the profile is not to say so.
        steer: who is told the schedule of each case, as PACKAGE:OBJECT; then one device by itself
            is played, since a schedule is chosen within a process.
    """

    backend: str
    communicator: str
    ranks: int
    profile: Profile
    families: tuple[str, ...]
    seed: int
    cases: int | None = None
    steer: str | None = None

    def run(self, watcher: Watcher) -> Result | None:
        """Play everything; None on ranks that a launcher started and that are not the first.

        Raises:
            BackendUnavailable: a backend is unknown, or cannot run here.
            UsageError: the device cannot be steered.
        """
        seat = registry.communicator(self.communicator).joined()
        if seat is not None and self.steer is not None:
            raise UsageError("a device is steered in one process, not in the ranks of a launch")
        if seat is not None and seat.rank > 0:
            launched.serve(self.backend, self.communicator, seat)
            return None
        began = time.monotonic()
        with self.subjects(seat) as subjects:
            plan = bouts(self.claims(), subjects)
            how = How(self.profile, self.seed, self.cases)
            findings = tuple(conduct(plan, how, watcher))
            most = max(size for subject in subjects.values() for size in subject.traits.sizes)
        return Result(
            backend=self.backend,
            communicator=self.communicator,
            ranks=most,
            profile=self.profile.value,
            seed=self.seed,
            findings=findings,
            seconds=time.monotonic() - began,
        )

    def claims(self) -> list[Property]:
        """The properties of the families asked for, in the suite's order."""
        return [claim for claim in suite.properties() if claim.family in self.families]

    @contextmanager
    def subjects(self, seat: Rendezvous | None) -> Iterator[Mapping[Executor, Subject]]:
        """The executors that fit the backend, closed at the end."""
        with ExitStack() as stack:
            made = self._subjects(seat)
            for subject in made.values():
                stack.enter_context(closing(subject))
            yield made

    def _subjects(self, seat: Rendezvous | None) -> dict[Executor, Subject]:
        backend = registry.accelerator(self.backend)
        if isinstance(backend, ControlledBackend):
            return {Executor.VIRTUAL: ControlledSubject(backend)}
        if self.steer is not None:
            return {Executor.DEVICE: DeviceSubject(backend, steering(self.steer))}
        ranks: Subject
        if seat is None:
            ranks = ProcessSubject(self.backend, self.communicator, self.ranks)
        else:
            ranks = launched.LaunchedSubject(self.backend, self.communicator, seat)
        return {Executor.DEVICE: DeviceSubject(backend), Executor.RANKS: ranks}
