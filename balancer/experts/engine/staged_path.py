"""The staged path: chunks of layers travel to staging, overlapped with the forward pass, and the
compute stream commits them between two steps. No lock.
"""

import logging
from dataclasses import replace

from equipoise.balancer.experts.config import BalancerConfig
from equipoise.balancer.experts.engine.serving_state import ServingState
from equipoise.balancer.experts.engine.states import (
    Failed,
    Finished,
    InTransfer,
    RebalanceId,
    Staged,
    TransferProgress,
    Transferring,
)
from equipoise.balancer.experts.placement import ExpertShape, Layout, Load
from equipoise.balancer.experts.planning.proposal import (
    Proposal,
    StagedProposal,
    TransferLimits,
    staged_proposal,
)
from equipoise.balancer.experts.planning.rebalance_plan import limits_of, plan_rebalance
from equipoise.balancer.experts.runtime.jobs import Job, JobHandle
from equipoise.balancer.experts.runtime.workers import Worker
from equipoise.balancer.experts.transfer.p2p import P2PTransfer, ReadyChunk, stage_chunk
from equipoise.hal.errors import VoteOutcomeUnknown

CHUNKS_IN_FLIGHT = 2
"""Lots on the way at once: one travels while the other is voted on."""
TRANSFER_FAILED = "move failed"
LOG = logging.getLogger(__name__)


class StagedPath:
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
        installed: ServingState,
        mover: P2PTransfer,
        worker: Worker,
        rank: int,
        shape: ExpertShape,
        config: BalancerConfig,
    ) -> None:
        self._serving_state = installed
        self._transfer = mover
        self._worker = worker
        self._rank = rank
        self._shape = shape
        self._config = config

    def propose(self, windows: Load, layout: Layout) -> StagedProposal:
        """Plan; runs beside the forward. Raises `PlacementError`."""
        staging = self._serving_state.store.layout.staging
        limits = limits_of(self._config, staging)
        freight = TransferLimits(
            self._config.slots_per_message, self._config.nodes, staging, self._rank
        )
        return staged_proposal(
            plan_rebalance(windows, layout, self._shape, limits), layout, self._shape, freight
        )

    def start(self, epoch: RebalanceId, proposal: Proposal, step: int) -> Transferring | Finished:
        """All ranks have the same proposal, at the boundary before `step`: let its lots go."""
        assert isinstance(proposal, StagedProposal)
        return self._start_chunks(TransferProgress(self, epoch, proposal, 0, step, ()))

    def poll(self, voyage: TransferProgress) -> InTransfer | Failed:
        """Which lots are staged by now; they are staged in the order in which they were let go."""
        staged: list[ReadyChunk] = []
        for task in voyage.in_flight:
            if not task.done():
                break
            if (error := task.exception()) is not None:
                LOG.warning("epoch %d: move failed: %s", voyage.rebalance.number, error)
                return Failed(voyage.rebalance, TRANSFER_FAILED, voyage)
            staged.append(task.result())
        return Staged(voyage, tuple(staged)) if staged else Transferring(voyage)

    def commit(self, state: Staged, lots: int, step: int) -> Transferring | Finished:
        """The next `lots` lots are staged everywhere, and are right: install them.

        Raises:
            AgreementLost: they are not staged here, so ranks disagree about history.
        """
        if len(state.ready_chunks) < lots:
            raise VoteOutcomeUnknown(
                f"told to commit {lots} lots with {len(state.ready_chunks)} staged"
            )
        for lot in state.ready_chunks[:lots]:
            self._serving_state.commit(lot.layer_update, lot.staged.copies)
        voyage = state.progress
        done, rest = voyage.chunks_committed + lots, voyage.in_flight[lots:]
        return self._start_chunks(
            replace(voyage, chunks_committed=done, last_progress_step=step, in_flight=rest)
        )

    def repair(self, reason: str) -> tuple[JobHandle[None], ...]:
        """Behind a failed move on any rank all build the mover's communicator again.

        All abort for the same reason, so all come. The mover's worker does it behind the lots that
        still fly; until it is through, the epoch drains. Who comes too late finds it failed still:
        the next epoch's move fails, and all try once more.
        """
        if reason != TRANSFER_FAILED or not self._transfer.can_rebuild:
            return ()
        return (self._worker.start(self._transfer.rebuild_communicator(), "mend"),)

    def _start_chunks(self, voyage: TransferProgress) -> Transferring | Finished:
        """Let go as many lots as there is staging for; or land, if all are committed."""
        if voyage.chunks_committed == voyage.proposal.migration.chunks:
            proposal = voyage.proposal
            return Finished(
                voyage.rebalance,
                len(proposal.plan.changed_layers),
                proposal.migration.remote_copies,
            )
        while self._can_start_chunk(voyage):
            lot = voyage.chunks_committed + len(voyage.in_flight)
            job = self._stage_job(voyage.proposal, lot)
            task = self._worker.start(job, "move", epoch=voyage.rebalance.number, lot=lot)
            flying = (*voyage.in_flight, task)
            voyage = replace(voyage, in_flight=flying)
        return Transferring(voyage)

    @staticmethod
    def _can_start_chunk(voyage: TransferProgress) -> bool:
        """Whether the next lot has staging beside those that fly; alike on every rank."""
        lot, shipment = voyage.chunks_committed + len(voyage.in_flight), voyage.proposal.migration
        if lot == shipment.chunks or len(voyage.in_flight) == CHUNKS_IN_FLIGHT:
            return False
        return not voyage.in_flight or shipment.fits_with(lot - 1, lot)

    def _stage_job(self, proposal: StagedProposal, lot: int) -> Job[ReadyChunk]:
        """Begin here, end in a job; what fails here fails the epoch as it would there."""
        try:
            staging = self._transfer.stage(proposal.transfers[lot], self._serving_state.last_change)
        except Exception as error:
            return _failed_job(error)
        return stage_chunk(staging, proposal.layer_updates[lot])


def _failed_job(error: Exception) -> Job[ReadyChunk]:
    """A job that has failed before it began."""
    yield from ()
    raise error
