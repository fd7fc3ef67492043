"""The boundary path: lots of layers travel to staging beside the forward, and are committed between
two steps by the compute stream itself. No lock.
"""

import logging
from dataclasses import replace

from equipoise.balancer.experts.config import EngineConfig
from equipoise.balancer.experts.engine.serving_state import Installed
from equipoise.balancer.experts.engine.states import (
    Barred,
    Committing,
    Epoch,
    Landed,
    Moving,
    Travelling,
    Updating,
    Voyage,
)
from equipoise.balancer.experts.placement import Layout, Load, Shape
from equipoise.balancer.experts.planning.proposal import Freight, Proposal, Shipped, by_ship
from equipoise.balancer.experts.planning.rebalance_plan import draft, limits_of
from equipoise.balancer.experts.runtime.jobs import Job, Task, Titled, Worker
from equipoise.balancer.experts.transfer.p2p import Mover, ReadyLot, ready_lot
from equipoise.hal.errors import AgreementLost

FLYING = 2
"""Lots on the way at once: one travels while the other is voted on."""
MOVE_FAILED = "move failed"
LOG = logging.getLogger(__name__)


class Voyages:
    """Carries what was agreed on from staging to slots, on one rank.

    Args:
        installed: what this rank holds.
        mover: fills staging.
        worker: stages one lot after another.
        rank: this rank.
        shape: how many of everything.
        config: bounds.
    """

    def __init__(
        self,
        installed: Installed,
        mover: Mover,
        worker: Worker,
        rank: int,
        shape: Shape,
        config: EngineConfig,
    ) -> None:
        self._installed = installed
        self._mover = mover
        self._worker = worker
        self._rank = rank
        self._shape = shape
        self._config = config

    def propose(self, windows: Load, layout: Layout) -> Shipped:
        """Plan; runs beside the forward. Raises `PlacementError`."""
        staging = self._installed.store.layout.staging
        limits = limits_of(self._config, staging)
        freight = Freight(self._config.parcel, self._config.nodes, staging, self._rank)
        return by_ship(draft(windows, layout, self._shape, limits), layout, self._shape, freight)

    def embark(self, epoch: Epoch, proposal: Proposal, step: int) -> Moving | Landed:
        """All ranks have the same proposal, at the boundary before `step`: let its lots go."""
        assert isinstance(proposal, Shipped)
        return self._go_on(Voyage(epoch, proposal, 0, step, ()))

    def look(self, voyage: Voyage) -> Travelling | Barred:
        """Which lots are staged by now; they are staged in the order in which they were let go."""
        staged: list[ReadyLot] = []
        for task in voyage.flying:
            if not task.done():
                break
            if (error := task.exception()) is not None:
                LOG.warning("epoch %d: move failed: %s", voyage.epoch.number, error)
                return Barred(voyage.epoch, MOVE_FAILED, voyage)
            staged.append(task.result())
        return Committing(voyage, tuple(staged)) if staged else Moving(voyage)

    def commit(self, state: Committing, lots: int, step: int) -> Moving | Landed:
        """The next `lots` lots are staged everywhere, and are right: install them.

        Raises:
            AgreementLost: they are not staged here, so ranks disagree about history.
        """
        if len(state.staged) < lots:
            raise AgreementLost(f"told to commit {lots} lots with {len(state.staged)} staged")
        for lot in state.staged[:lots]:
            self._installed.commit(lot.change, lot.staged.copies)
        voyage = state.voyage
        done, rest = voyage.committed + lots, voyage.flying[lots:]
        return self._go_on(replace(voyage, committed=done, since=step, flying=rest))

    def advance(self, state: Updating, step: int) -> Updating | Landed:
        """Nothing is rewritten in place on this path."""
        raise AgreementLost(f"epoch {state.epoch.number} is an update on a path that has no locks")

    def mend(self, reason: str) -> tuple[Task[None], ...]:
        """Behind a failed move on any rank all build the mover's communicator again.

        All abort for the same reason, so all come. The mover's worker does it behind the lots that
        still fly; until it is through, the epoch drains. Who comes too late finds it failed still:
        the next epoch's move fails, and all try once more.
        """
        if reason != MOVE_FAILED or not self._mover.mendable:
            return ()
        return (self._worker.start(Titled(self._mover.mend(), "mend")),)

    def _go_on(self, voyage: Voyage) -> Moving | Landed:
        """Let go as many lots as there is staging for; or land, if all are committed."""
        if voyage.committed == voyage.proposal.shipment.lots:
            proposal = voyage.proposal
            return Landed(voyage.epoch, len(proposal.draft.order), proposal.shipment.travelling)
        while self._may_fly(voyage):
            lot = voyage.committed + len(voyage.flying)
            job = self._let_go(voyage.proposal, lot)
            task = self._worker.start(Titled(job, "move", epoch=voyage.epoch.number, lot=lot))
            flying = (*voyage.flying, task)
            voyage = replace(voyage, flying=flying)
        return Moving(voyage)

    @staticmethod
    def _may_fly(voyage: Voyage) -> bool:
        """Whether the next lot has staging beside those that fly; alike on every rank."""
        lot, shipment = voyage.committed + len(voyage.flying), voyage.proposal.shipment
        if lot == shipment.lots or len(voyage.flying) == FLYING:
            return False
        return not voyage.flying or shipment.fits_beside(lot - 1, lot)

    def _let_go(self, proposal: Shipped, lot: int) -> Job[ReadyLot]:
        """Begin here, end in a job; what fails here fails the epoch as it would there."""
        try:
            staging = self._mover.begin(proposal.legs[lot], self._installed.settled)
        except Exception as error:
            return _failing(error)
        return ready_lot(staging, proposal.changes[lot])


def _failing(error: Exception) -> Job[ReadyLot]:
    """A job that has failed before it began."""
    yield from ()
    raise error
