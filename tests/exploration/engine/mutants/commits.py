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
from equipoise.balancer.experts.engine.serving_state import Copies, ServingState
from equipoise.balancer.experts.engine.staged_path import StagedPath
from equipoise.balancer.experts.engine.states import (
    Failed,
    Finished,
    Staged,
    TransferProgress,
    Transferring,
    Travelling,
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

    def poll(self, voyage: TransferProgress) -> Travelling | Failed:
        after = super().poll(voyage)
        if isinstance(after, Staged):
            for lot in after.staged:
                if not any(lot is early for early in self._ahead):
                    self._ahead.append(lot)
                    self._installed.commit(lot.change, lot.staged.copies)
        return after

    def commit(self, state: Staged, lots: int, step: int) -> Transferring | Finished:
        installed, self._installed = self._installed, _Nowhere(self._installed)  # type: ignore[assignment]
        try:
            after = super().commit(state, lots, step)
        finally:
            self._installed = installed
        return after


class _Nowhere:
    """What is committed here was installed before."""

    def __init__(self, installed: ServingState) -> None:
        self.settled = installed.last_change

    def commit(self, change: LayerUpdate, copies: Copies) -> None:
        """Nothing is left to do."""


class CommitsAll(StagedPath):
    """Installs all that is staged here, however many lots were agreed on."""

    def commit(self, state: Staged, lots: int, step: int) -> Transferring | Finished:
        return super().commit(state, len(state.staged), step)


class OverlapsBuffers(StagedPath):
    """Lets a lot go beside another that fills the same buffers."""

    @staticmethod
    def _may_fly(voyage: TransferProgress) -> bool:
        lot = voyage.committed + len(voyage.in_flight)
        return lot < voyage.proposal.migration.chunks and len(voyage.in_flight) < 2


class OverwritesSources(StagedPath):
    """Installs a lot that some rank has staged; who has not brings the weights in later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._late: list[Any] = []

    def poll(self, voyage: TransferProgress) -> Travelling | Failed:
        self._catch_up()
        after = super().poll(voyage)
        return Staged(after.voyage, ()) if isinstance(after, Transferring) else after

    def commit(self, state: Staged, lots: int, step: int) -> Transferring | Finished:
        missing = lots - len(state.staged)
        after = super().commit(state, lots - max(missing, 0), step)
        for _ in range(missing):
            assert isinstance(after, Transferring)
            after = self._tables_only(after.voyage)
        return after

    def _tables_only(self, voyage: TransferProgress) -> Transferring | Finished:
        self._installed.commit(voyage.proposal.changes[voyage.committed], ())
        self._late.append(voyage.in_flight[0])
        done, rest = voyage.committed + 1, voyage.in_flight[1:]
        return self._go_on(replace(voyage, committed=done, in_flight=rest))

    def _catch_up(self) -> None:
        for task in [task for task in self._late if task.done()]:
            self._late.remove(task)
            if task.exception() is None:
                copies = task.result().staged.copies
                self._installed.store.commit(copies, self._installed._compute)


def any_rank(ballots: Sequence[Ballot]) -> Verdict:
    """A lot may be committed when one rank has staged it."""
    verdict = tally(ballots)
    most = max(len(ballot.staged) for ballot in ballots)
    moving = {ballot.status for ballot in ballots} == {RankStatus.TRANSFERRING}
    return Commit(most) if moving and most and isinstance(verdict, Pending) else verdict


class TablesFirst(ServingState):
    """Flips generations, and holds readers for the copying of the weights only."""

    def commit(self, change: LayerUpdate, copies: Copies) -> None:
        self._accelerator.kernels.commit_tables(change.update, self.tables, self._compute)
        held = self.readers.hold(self._compute)
        if copies:
            self.store.commit(copies, self._compute)
        self._compute.record(self._settled)
        self.readers.follow(held, self._settled)
        self._layout = change.applied_to(self._layout)


class _Forgotten:
    def detach(self) -> None:
        """Nobody had heard of it."""


class ForgetsReaders(ServingState):
    """Commits without regard to attached streams."""

    def attach(self, stream: Stream) -> Reader:
        stream.wait(self._settled)
        return _Forgotten()


class AcknowledgesUnread(P2PTransfer):
    """Says that a lot is staged before the copy stream has come to its end."""

    def _land(self, leg: RankTransfers, hold: Any) -> Job[StagedChunk]:
        early: Any = stream_idle(self._accelerator, self._copy)
        landing = super()._land(leg, hold)
        due = next(landing)
        while True:
            yield early
            early = due  # each wait is for what came before the last part
            try:
                due = landing.send(None)
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
        broken="a third lot is let go before the first is committed",
        property="right-weights",
        patches={"engine.staged_path.CHUNKS_IN_FLIGHT": 3},
    ),
    Mutant(
        name="buffers-overlap",
        broken="two lots fly that need the same buffers",
        property="right-weights",
        patches={"balancer.StagedPath": OverlapsBuffers},
    ),
    Mutant(
        name="source-overwritten",
        broken="a lot is committed when one rank has staged it, not all",
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
        broken="a lot counts as staged before the copy stream has come to its end",
        property="explained",
        patches={"balancer.P2PTransfer": AcknowledgesUnread},
    ),
)
