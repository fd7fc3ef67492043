"""Mutants of slots that retire: before they are written, while they are, and behind an abort."""

from collections.abc import Sequence
from dataclasses import replace

from exploration.engine.case import Case, FaultKind, Path
from exploration.engine.mutants.mutant import Mutant, with_fault
from torch import Tensor

from equipoise.balancer.experts.change import Change
from equipoise.balancer.experts.installed import Copies, Installed
from equipoise.balancer.experts.jobs import Completed, Job
from equipoise.balancer.experts.lots import ReadyLot
from equipoise.balancer.experts.mover import Mover
from equipoise.balancer.experts.planner import Shipped
from equipoise.balancer.experts.renewal import LaggedShares, Resting, Solving
from equipoise.balancer.experts.voyages import Voyages


def serving_on(proposal: Shipped) -> Shipped:
    """The same without a word to the tables."""
    return replace(proposal, retirements=(None,) * len(proposal.retirements))


class WritesServing(Voyages):
    """Fills slots at once that tokens still reach."""

    def _let_go(self, proposal: Shipped, lot: int) -> Job[ReadyLot]:
        return super()._let_go(serving_on(proposal), lot)


class WritesWhileRead(Voyages):
    """Takes tokens off a slot behind what fills it."""

    def _let_go(self, proposal: Shipped, lot: int) -> Job[ReadyLot]:
        flying = super()._let_go(serving_on(proposal), lot)
        if (retirement := proposal.retirements[lot]) is not None:
            self._installed.commit(retirement, ())
        return flying


class LetsInAgain(LaggedShares):
    """Installs shares for a placement that is still there, whatever has retired since."""

    def _take(self) -> Job[None]:
        if not isinstance(self._state, Solving):
            return
        change = yield Completed(self._state.better)
        self._state = Resting()
        layout = self._installed.layout
        if change is not None and (layout.placement[[*change.layers]] == change.placement).all():
            self._installed.commit(change, ())


class ForgetsRetired(Installed):
    """Takes a slot that has retired for one that holds what it held before."""

    def commit(self, change: Change, copies: Copies) -> None:
        super().commit(change, copies)
        self._layout = replace(self._layout, retired=frozenset())


class LooksAside(Mover):
    """Sums what has come to the buffer aside, not what lies in the slot."""

    def _fill(self, blob: Tensor, slots: Sequence[int], marks: Tensor) -> None:
        assert self._aside is not None
        size = self._store.layout.slot_bytes
        for place, slot in enumerate(slots):
            part = blob[place * size : (place + 1) * size]
            self._store.unpack(part, (self._aside,), self._copy)
            mark = marks[place : place + 1]
            self._store.checksum_staging((self._aside,), mark, self._copy)
            self._store.commit(((self._aside, slot),), self._copy)


def late_movers(case: Case) -> bool:
    """Nothing goes wrong, and what fills slots from peers is late."""
    late = any(lag.kind == "mover" for lag in case.lags)
    return late and case.path is Path.BOUNDARY and not case.faults


MUTANTS = (
    Mutant(
        name="written-in-service",
        broken="slots are filled at once that have not retired",
        property="right-weights",
        patches={"assembly.Voyages": WritesServing},
    ),
    Mutant(
        name="retired-behind-the-write",
        broken="slots retire behind what fills them",
        property="right-weights",
        patches={"assembly.Voyages": WritesWhileRead},
        reaches=late_movers,
    ),
    Mutant(
        name="let-in-again",
        broken="shares that were solved before a slot has retired are installed behind that",
        property="right-weights",
        patches={"assembly.LaggedShares": LetsInAgain},
    ),
    Mutant(
        name="retired-forgotten",
        broken="behind an abort half-written slots pass for whole ones",
        property="right-weights",
        patches={"assembly.Installed": ForgetsRetired},
    ),
    Mutant(
        name="fill-not-checked",
        broken="nobody looks at what was filled at once where it lies",
        property="right-weights",
        patches={"assembly.Mover": LooksAside},
        reaches=with_fault(FaultKind.STAGING_FLIPPED),
    ),
)
