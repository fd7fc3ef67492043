"""Mutants of what is staged and committed: when, where, in which order, and beside whom."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from exploration.engine.mutants.mutant import Mutant

from equipoise.balancer.experts.agreement.ballot import (
    Ballot,
    Commit,
    Pending,
    RankStatus,
    Verdict,
    tally,
)
from equipoise.balancer.experts.engine.serving_state import ServingState, SlotCopies
from equipoise.balancer.experts.engine.staged_path import StagedPath
from equipoise.balancer.experts.engine.states import (
    Failed,
    Finished,
    InTransfer,
    Staged,
    TransferProgress,
    Transferring,
)
from equipoise.balancer.experts.planning.migration import RankTransfers
from equipoise.balancer.experts.routing.layer_update import LayerUpdate
from equipoise.balancer.experts.runtime.jobs import Job, stream_idle
from equipoise.balancer.experts.transfer.p2p import P2PTransfer, ReadyChunk, StagedChunk
from equipoise.hal.slots import Reader
from equipoise.hal.stream import Stream


class CommitsEarly(StagedPath):
    """Installs what is staged when it casts its ballot, a boundary before the verdict."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ahead: list[ReadyChunk] = []

    def poll(self, progress: TransferProgress) -> InTransfer | Failed:
        after = super().poll(progress)
        if isinstance(after, Staged):
            for chunk in after.ready_chunks:
                if not any(chunk is early for early in self._ahead):
                    self._ahead.append(chunk)
                    self._serving_state.commit(chunk.layer_update, chunk.staged.copies)
        return after

    def commit(self, state: Staged, chunks: int, step: int) -> Transferring | Finished:
        installed, self._serving_state = self._serving_state, _Nowhere(self._serving_state)  # type: ignore[assignment]
        try:
            after = super().commit(state, chunks, step)
        finally:
            self._serving_state = installed
        return after


class _Nowhere:
    """What is committed here was installed before."""

    def __init__(self, installed: ServingState) -> None:
        self.settled = installed.last_change

    def commit(self, update: LayerUpdate, copies: SlotCopies) -> None:
        """Nothing is left to do."""


class CommitsAll(StagedPath):
    """Installs all that is staged here, however many chunks were agreed on."""

    def commit(self, state: Staged, chunks: int, step: int) -> Transferring | Finished:
        return super().commit(state, len(state.ready_chunks), step)


class OverlapsBuffers(StagedPath):
    """Starts a chunk while another that fills the same buffers is in flight."""

    @staticmethod
    def _can_start_chunk(progress: TransferProgress) -> bool:
        chunk = progress.chunks_committed + len(progress.in_flight)
        return chunk < progress.proposal.migration.chunks and len(progress.in_flight) < 2


class OverwritesSources(StagedPath):
    """Commits a chunk that some rank has staged; other ranks bring the weights in later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._late: list[Any] = []

    def poll(self, progress: TransferProgress) -> InTransfer | Failed:
        self._catch_up()
        after = super().poll(progress)
        return Staged(after.progress, ()) if isinstance(after, Transferring) else after

    def commit(self, state: Staged, chunks: int, step: int) -> Transferring | Finished:
        missing = chunks - len(state.ready_chunks)
        after = super().commit(state, chunks - max(missing, 0), step)
        for _ in range(missing):
            assert isinstance(after, Transferring)
            after = self._tables_only(after.progress)
        return after

    def _tables_only(self, progress: TransferProgress) -> Transferring | Finished:
        self._serving_state.commit(progress.proposal.layer_updates[progress.chunks_committed], ())
        self._late.append(progress.in_flight[0])
        committed, rest = progress.chunks_committed + 1, progress.in_flight[1:]
        return self._start_chunks(replace(progress, chunks_committed=committed, in_flight=rest))

    def _catch_up(self) -> None:
        for task in [task for task in self._late if task.done()]:
            self._late.remove(task)
            if task.exception() is None:
                copies = task.result().staged.copies
                self._serving_state.store.commit(copies, self._serving_state._compute)


def any_rank(ballots: Sequence[Ballot]) -> Verdict:
    """A chunk may be committed when one rank has staged it."""
    verdict = tally(ballots)
    most = max(len(ballot.staged) for ballot in ballots)
    moving = {ballot.status for ballot in ballots} == {RankStatus.TRANSFERRING}
    return Commit(most) if moving and most and isinstance(verdict, Pending) else verdict


class TablesFirst(ServingState):
    """Flips generations, and holds readers for the copying of the weights only."""

    def commit(self, update: LayerUpdate, copies: SlotCopies) -> None:
        self._accelerator.kernels.commit_tables(update.tables, self.tables, self._compute)
        readers = self.readers.wait_for_readers(self._compute)
        if copies:
            self.store.commit(copies, self._compute)
        self._compute.record(self._last_change)
        self.readers.resume_readers(readers, self._last_change)
        self._layout = update.applied_to(self._layout)


class _Forgotten:
    def detach(self) -> None:
        """Nobody had heard of it."""


class ForgetsReaders(ServingState):
    """Commits without regard to attached streams."""

    def attach(self, stream: Stream) -> Reader:
        stream.wait(self._last_change)
        return _Forgotten()


class AcknowledgesUnread(P2PTransfer):
    """Reports a chunk as staged before the copy stream has come to its end."""

    def _finish_chunk(self, transfers: RankTransfers, chunk_state: Any) -> Job[StagedChunk]:
        previous_wait: Any = stream_idle(self._accelerator, self._copy)
        landing = super()._finish_chunk(transfers, chunk_state)
        next_wait = next(landing)
        while True:
            yield previous_wait
            previous_wait = next_wait  # each wait is for what came before the last part
            try:
                next_wait = landing.send(None)
            except StopIteration as end:
                staged: StagedChunk = end.value
                return staged


MUTANTS = (
    Mutant(
        name="early-commit",
        broken="a rank commits a boundary before the verdict",
        property="decided",
        patches={"balancer.StagedPath": CommitsEarly},
    ),
    Mutant(
        name="commit-of-all",
        broken="a rank commits all that it has staged, not what was agreed on",
        property="one-generation",
        patches={"balancer.StagedPath": CommitsAll},
    ),
    Mutant(
        name="staging-reused",
        broken="a third chunk is started before the first is committed",
        property="right-weights",
        patches={"engine.staged_path.CHUNKS_IN_FLIGHT": 3},
    ),
    Mutant(
        name="buffers-overlap",
        broken="two chunks in flight need the same buffers",
        property="right-weights",
        patches={"balancer.StagedPath": OverlapsBuffers},
    ),
    Mutant(
        name="source-overwritten",
        broken="a chunk is committed when one rank has staged it, not all",
        property="right-weights",
        patches={"balancer.StagedPath": OverwritesSources, "agreement.ballot.tally": any_rank},
    ),
    Mutant(
        name="tables-before-weights",
        broken="generations flip before slots are copied",
        property="one-generation",
        patches={"balancer.ServingState": TablesFirst},
    ),
    Mutant(
        name="reader-forgotten",
        broken="attached streams are not held",
        property="right-weights",
        patches={"balancer.ServingState": ForgetsReaders},
    ),
    Mutant(
        name="acknowledged-unread",
        broken="a chunk counts as staged before the copy stream has come to its end",
        property="explained",
        patches={"balancer.P2PTransfer": AcknowledgesUnread},
    ),
)
