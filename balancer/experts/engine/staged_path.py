"""The staged path: chunks of layers are transferred to staging, overlapped with the forward pass;
the compute stream commits them between two steps, without a lock.
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
"""Chunks in flight at once: one is transferred while the other is voted on. More would divide the
staging buffers further and save no time."""
TRANSFER_FAILED = "transfer failed"
LOG = logging.getLogger(__name__)


class StagedPath:
    """Transfers and commits the chunks of a proposal, on one rank.

    Args:
        serving_state: slots, tables and layout of this rank.
        transfer: fills staging.
        worker: stages one chunk after another.
        rank: this rank.
        shape: numbers of layers, experts, slots and ranks.
        config: bounds.
    """

    def __init__(
        self,
        serving_state: ServingState,
        transfer: P2PTransfer,
        worker: Worker,
        rank: int,
        shape: ExpertShape,
        config: BalancerConfig,
    ) -> None:
        self._serving_state = serving_state
        self._transfer = transfer
        self._worker = worker
        self._rank = rank
        self._shape = shape
        self._config = config

    def propose(self, windows: Load, layout: Layout) -> StagedProposal:
        """Plans, overlapped with the forward pass. Raises `PlacementError`."""
        staging = self._serving_state.store.layout.staging
        limits = limits_of(self._config, staging)
        transfer_limits = TransferLimits(
            self._config.slots_per_message, self._config.nodes, staging, self._rank
        )
        return staged_proposal(
            plan_rebalance(windows, layout, self._shape, limits),
            layout,
            self._shape,
            transfer_limits,
        )

    def start(
        self, rebalance: RebalanceId, proposal: Proposal, step: int
    ) -> Transferring | Finished:
        """Starts the first chunks, at the boundary before `step`; all ranks have the proposal."""
        assert isinstance(proposal, StagedProposal)
        return self._start_chunks(TransferProgress(self, rebalance, proposal, 0, step, ()))

    def poll(self, progress: TransferProgress) -> InTransfer | Failed:
        """Returns which chunks are staged by now; they are staged in the order of their start."""
        staged: list[ReadyChunk] = []
        for handle in progress.in_flight:
            if not handle.done():
                break
            if (error := handle.exception()) is not None:
                LOG.warning("rebalance %d: transfer failed: %s", progress.rebalance.number, error)
                return Failed(progress.rebalance, TRANSFER_FAILED, progress)
            staged.append(handle.result())
        return Staged(progress, tuple(staged)) if staged else Transferring(progress)

    def commit(self, state: Staged, chunks: int, step: int) -> Transferring | Finished:
        """Commits the next `chunks` chunks, which are staged and verified on all ranks.

        Raises:
            VoteOutcomeUnknown: they are not staged here, so ranks disagree about what happened.
        """
        if len(state.ready_chunks) < chunks:
            raise VoteOutcomeUnknown(
                f"the verdict commits {chunks} chunks, and {len(state.ready_chunks)} are staged"
            )
        for chunk in state.ready_chunks[:chunks]:
            self._serving_state.commit(chunk.layer_update, chunk.staged.copies)
        progress = state.progress
        return self._start_chunks(
            replace(
                progress,
                chunks_committed=progress.chunks_committed + chunks,
                last_progress_step=step,
                in_flight=progress.in_flight[chunks:],
            )
        )

    def repair(self, reason: str) -> tuple[JobHandle[None], ...]:
        """Rebuilds the communicator of the transfer on all ranks, after it failed on any of them.

        All ranks abort for the same reason, so all take part. The transfer worker does it after the
        chunks that are still in flight, and the rebalance drains until then. If a rank comes too
        late, the rebuild fails, the next rebalance fails too, and all ranks try again.
        """
        if reason != TRANSFER_FAILED or not self._transfer.can_rebuild:
            return ()
        return (self._worker.start(self._transfer.rebuild_communicator(), "mend"),)

    def _start_chunks(self, progress: TransferProgress) -> Transferring | Finished:
        """Starts the chunks that staging has room for; returns `Finished` if all are committed."""
        if progress.chunks_committed == progress.proposal.migration.chunks:
            proposal = progress.proposal
            return Finished(
                progress.rebalance,
                len(proposal.plan.changed_layers),
                proposal.migration.remote_copies,
            )
        while self._can_start_chunk(progress):
            chunk = progress.chunks_committed + len(progress.in_flight)
            job = self._stage_job(progress.proposal, chunk)
            handle = self._worker.start(
                job, "move", rebalance=progress.rebalance.number, chunk=chunk
            )
            progress = replace(progress, in_flight=(*progress.in_flight, handle))
        return Transferring(progress)

    @staticmethod
    def _can_start_chunk(progress: TransferProgress) -> bool:
        """Returns whether staging has room for the next chunk; equal on all ranks."""
        chunk, migration = (
            progress.chunks_committed + len(progress.in_flight),
            progress.proposal.migration,
        )
        if chunk == migration.chunks or len(progress.in_flight) == CHUNKS_IN_FLIGHT:
            return False
        return not progress.in_flight or migration.fits_with(chunk - 1, chunk)

    def _stage_job(self, proposal: StagedProposal, chunk: int) -> Job[ReadyChunk]:
        """Starts to stage a chunk; the job raises an error of the start, to fail the rebalance."""
        try:
            staging = self._transfer.stage(
                proposal.transfers[chunk], self._serving_state.last_change
            )
        except Exception as error:
            return _failed_job(error)
        return stage_chunk(staging, proposal.layer_updates[chunk])


def _failed_job(error: Exception) -> Job[ReadyChunk]:
    """Returns a job that raises `error`."""
    yield from ()
    raise error
