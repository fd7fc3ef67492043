"""Faults, injected at random points of random programs of operations.

Each program plays on one communicator, and one rank breaks at one of its steps: it is killed, it
stops for good, it pauses for less than the deadline, or it drops one operation. Everything that
depends on it afterwards must fail by the deadline with an error that names operation and purpose;
the control plane must name the lost rank and accuse nobody else; a communicator that the fault did
not touch must go on working; and nothing of the survivors may stay behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.bench import (
    Bench,
    End,
    Play,
    Until,
    attempt,
    demand,
    equal,
    outcome,
)
from equipoise.hal.conformance.deeds import Deed, deeds
from equipoise.hal.conformance.fault_cases import LOSING, Fault, Plot, plot, programs
from equipoise.hal.conformance.program import Program
from equipoise.hal.conformance.property import Pace, Property, Ranks, Traits
from equipoise.hal.control import ControlPlane
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed, Violation
from equipoise.hal.work import Work


@dataclass(frozen=True)
class _Pending:
    """A deed in flight, or refused."""

    number: int
    deed: Deed
    work: Work | None
    refusal: Exception | None


@dataclass
class _Survivor:
    """One rank that plays a plot."""

    bench: Bench
    plot: Plot
    control: ControlPlane
    hit: Communicator
    doing: str = "start"

    def perform(self) -> Play:
        """All steps; waits for each operation, at the latest at the end."""
        pending: list[_Pending] = []
        for number, step in enumerate(self.plot.steps):
            if self.bench.rank == self.plot.victim and number == self.plot.at:
                yield from self._suffer()
                if self.plot.fault is Fault.DROP:
                    continue
            for deed in deeds(self.bench, self.hit, step, number):
                pending.append(self._issue(number, deed))
            while len(pending) > self.plot.window:
                yield from self._settle(pending.pop(0))
        for left in pending:
            yield from self._settle(left)

    def _suffer(self) -> Play:
        if self.plot.fault is Fault.DELAY:
            yield from self.bench.pause()
        elif self.plot.fault in LOSING:
            yield from self.bench.end(End(self.plot.fault))

    def _issue(self, number: int, deed: Deed) -> _Pending:
        self.doing = f"step {number}, {deed.op}"
        self.control.enter(self.doing)
        begun: list[Work] = []
        refusal = attempt(lambda: begun.append(deed.issue()), CommunicatorFailed)
        return _Pending(number, deed, begun[0] if begun else None, refusal)

    def _settle(self, pending: _Pending) -> Play:
        """Compare how it ended with what the plot allows."""
        number, deed, error = pending.number, pending.deed, pending.refusal
        what = f"step {number}, {deed.op}"
        if pending.work is not None:
            error = yield from outcome(self.bench, pending.work, what)
        if error is not None:
            self._explain(number, deed, error)
            return
        missed = self.plot.victim in deed.needs and self.plot.misses(number)
        mine = self.bench.rank == self.plot.victim
        demand("E1", mine or not missed, f"{what} ended well without rank {self.plot.victim}")
        if deed.found is not None and deed.due is not None:
            equal("E1", deed.found, deed.due, what)

    def _explain(self, number: int, deed: Deed, error: Exception) -> None:
        """An error must be due, and must name operation and purpose."""
        told = f"{type(error).__name__}: {error}"
        due = any(self.plot.spoils(earlier) for earlier in range(number + 1))
        demand("E1", due, f"step {number}, {deed.op} was not to fail: {told}")
        demand("E1", isinstance(error, CommunicatorFailed), f"{deed.op} raised {told}")
        named = deed.op in str(error) and self.hit.purpose in str(error)
        demand("E1", named, f"{deed.op} of {self.hit.purpose!r} is not named: {told}")

    def learn(self) -> Play:
        """Who was lost, from the control plane (clause C5)."""
        if not self.plot.lost:
            loss = self.control.lost(0.0)
            demand("C5", loss is None, f"nobody was lost, yet: {loss}")
            return
        yield Until(lambda: self.control.lost(0.0) is not None, "word of the lost rank")
        loss = self.control.lost(self.bench.patience)
        if loss is None:
            raise Violation("C5", f"nobody says that rank {self.plot.victim} was lost")
        demand("C5", loss.rank == self.plot.victim, f"not rank {self.plot.victim}: {loss}")
        demand("C5", self.doing in str(loss), f"{self.doing!r} is not named: {loss}")


def _meet(bench: Bench, control: ControlPlane, question: str, ranks: Sequence[int]) -> Play:
    """Wait for these ranks, this one among them, by the control plane alone."""
    control.cast(question, b"")

    def come() -> bool:
        looked = attempt(lambda: control.collect(question, 0.0, ranks), BallotIncomplete)
        return looked is None

    yield Until(come, f"the others at {question!r}")
    control.collect(question, bench.patience, ranks)


def _go_on(bench: Bench, spared: Communicator) -> Play:
    """What the fault has not touched still works (clause X3)."""
    value = bench.of(torch.tensor([1 << spared.rank]))
    begun: list[Work] = []
    error = attempt(lambda: begun.append(spared.all_reduce(value)), CommunicatorFailed)
    if begun:
        error = yield from outcome(bench, begun[0], "a sum of the spared")
    demand("X3", error is None, f"another communicator failed too: {error}")
    equal("X3", value, torch.tensor([(1 << spared.size) - 1]), "a sum of the spared")


def _play(bench: Bench, found: Program) -> Play:
    """One communicator suffers the fault, the other goes on without whoever is lost."""
    assert bench.fabric is not None
    told, control = plot(found), bench.fabric.control
    hit = yield from bench.communicator("hit")
    left = [rank for rank in range(bench.size) if rank not in told.lost]
    spared = hit if bench.rank in told.lost else (yield from bench.communicator("spared", left))
    # Nothing breaks before everybody is there: opening is not what is tried here.
    yield from _meet(bench, control, "begin", range(bench.size))
    survivor = _Survivor(bench, told, control, hit)
    yield from survivor.perform()
    yield from survivor.learn()
    # What follows has a deadline of its own, which must not run while others wait for theirs.
    yield from _meet(bench, control, "end", left)
    yield from _go_on(bench, spared)


def _several_ranks(traits: Traits) -> str | None:
    return None if max(traits.sizes) > 1 else "several ranks"


FAULTS = Property(
    name="a-fault-ends-what-depends-on-it-and-nothing-else",
    family="faults",
    clauses=("E1", "C5", "C8", "X3", "R1"),
    claim="A rank that is killed, stopped, late or misses an operation ends only what needs it.",
    programs=programs,
    play=_play,
    needs=_several_ranks,
    ranks=Ranks.GROUP,
    pace=Pace.BRISK,
    loses=lambda found: plot(found).lost,
)
PROPERTIES = (FAULTS,)
