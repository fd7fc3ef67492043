"""The states of the engine, one frozen type each, with the ballot and outcome key of each.

    Idle -> Planning -> Proposed -> Transferring <-> Staged -> Idle     (staged path)
                        Proposed -> Updating -> Idle                    (in-place path)
            any state that votes -> Draining -> Idle                    (abort)

A state changes only at a boundary (between two steps), and on verdicts that all ranks reach from
the same ballots at the same boundary. The one exception is local progress within a rebalance:
Planning becomes Proposed, and Transferring becomes Staged, when this rank's own work is done; until
all ranks have come that far, the verdict is `Pending`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from equipoise.balancer.experts.agreement.ballot import Ballot, RankStatus
from equipoise.balancer.experts.planning.proposal import Proposal, StagedProposal
from equipoise.balancer.experts.runtime.jobs import JobHandle
from equipoise.balancer.experts.transfer.p2p import ReadyChunk


@dataclass(frozen=True)
class Idle:
    """No rebalance is open; load is counted."""


@dataclass(frozen=True)
class RebalanceId:
    """Number of a rebalance, and the boundary at which it was opened."""

    number: int
    opened_at: int


@dataclass(frozen=True)
class Planning:
    """The planner runs, overlapped with the forward pass."""

    rebalance: RebalanceId
    job: JobHandle[Proposal]


@dataclass(frozen=True)
class Proposed:
    """This rank has its proposal and waits for those of the other ranks."""

    rebalance: RebalanceId
    proposal: Proposal


class TransferPath(Protocol):
    """Transfers and commits chunks, as the ranks agree."""

    def poll(self, progress: "TransferProgress") -> "InTransfer | Failed":
        """Returns the state after the progress of this rank's own transfer."""
        ...

    def commit(self, state: "Staged", chunks: int, step: int) -> "Transferring | Finished":
        """Commits the next `chunks` chunks, which are staged and verified on all ranks."""
        ...


@dataclass(frozen=True)
class TransferProgress:
    """How far the transfer of a rebalance is.

    Attributes:
        path: the path that transfers.
        rebalance: the rebalance.
        proposal: the proposal that is being installed.
        chunks_committed: number of committed chunks.
        last_progress_step: boundary of the last commit, or of the agreement on the proposal.
        in_flight: jobs of the chunks that were started after those, in order; running or done.
    """

    path: TransferPath
    rebalance: RebalanceId
    proposal: StagedProposal
    chunks_committed: int
    last_progress_step: int
    in_flight: tuple[JobHandle[ReadyChunk], ...]


@dataclass(frozen=True)
class Transferring:
    """Weights are transferred to staging; everything staged here is committed."""

    progress: TransferProgress

    @property
    def rebalance(self) -> RebalanceId:
        """The rebalance of the transfer."""
        return self.progress.rebalance


@dataclass(frozen=True)
class Staged:
    """The next chunks are staged on this rank, which waits for the other ranks."""

    progress: TransferProgress
    ready_chunks: tuple[ReadyChunk, ...]

    @property
    def rebalance(self) -> RebalanceId:
        """The rebalance of the transfer."""
        return self.progress.rebalance


@dataclass(frozen=True)
class Draining:
    """The rebalance was aborted, but its jobs still run and own their buffers."""

    work: tuple[JobHandle[Any], ...]

    @property
    def done(self) -> bool:
        """Whether all jobs have ended."""
        return all(task.done() for task in self.work)


class InPlaceUpdate(Protocol):
    """Rewrites layers by steps, which all ranks count alike."""

    def advance(self, state: "Updating", step: int) -> "Updating | Finished":
        """Runs the next boundary of the update; there is no vote."""
        ...


@dataclass(frozen=True)
class Updating:
    """Layers are rewritten in place, one update per step, without further votes.

    Attributes:
        path: the path that rewrites them.
        rebalance: the rebalance.
        proposal: the proposal that is being installed.
        first_step: the boundary at which the first update was handed over.
        writes: jobs of the updates that were handed over, in order.
    """

    path: InPlaceUpdate
    rebalance: RebalanceId
    proposal: Proposal
    first_step: int
    writes: tuple[JobHandle[None], ...]


@dataclass(frozen=True)
class Finished:
    """Everything is installed: the rebalance ends at this boundary.

    Attributes:
        rebalance: the rebalance.
        layers: number of layers whose placement it changed.
        copies: slots whose expert the rank did not hold before, over all ranks.
    """

    rebalance: RebalanceId
    layers: int
    copies: int


@dataclass(frozen=True)
class RebalanceReport:
    """How a rebalance ended, at the boundary before `step`.

    Attributes:
        number: number of the rebalance.
        opened_at: the boundary that opened it, one step after its load window was closed.
        step: the boundary at which it ended.
        outcome: `committed`, `unchanged` if the plan left every slot as it was, or the reason of
            the abort.
        copies: committed slots whose expert the rank did not hold before, over all ranks.
        bytes_moved: size of those slots.
    """

    number: int
    opened_at: int
    step: int
    outcome: str
    copies: int
    bytes_moved: int


@dataclass(frozen=True)
class Failed:
    """This rank cannot go on with the rebalance; its next ballot says so.

    Attributes:
        rebalance: the rebalance.
        reason: the reason on the ballot.
        within: what failed: planning, a transfer, or jobs of an earlier rebalance that still run.
    """

    rebalance: RebalanceId
    reason: str
    within: Planning | TransferProgress | Draining


InTransfer = Transferring | Staged
Voting = Planning | Proposed | InTransfer | Failed
"""States in which every boundary has a vote."""
State = Idle | Voting | Updating | Draining


START_TRANSFER = "move"
"""Outcome key of the first votes of a rebalance: whether to start the transfer."""


def ballot_of(state: Voting) -> Ballot:
    """Returns the ballot of a rank in this state."""
    match state:
        case Planning():
            return Ballot(RankStatus.PLANNING)
        case Proposed(_, proposal):
            return Ballot(RankStatus.PROPOSED, proposal.digest)
        case Transferring(progress):
            return Ballot(RankStatus.TRANSFERRING, progress.proposal.digest)
        case Staged(progress, staged):
            return Ballot(
                RankStatus.TRANSFERRING,
                progress.proposal.digest,
                tuple(chunk.checksum for chunk in staged),
            )
        case Failed(_, reason, _):
            return Ballot(RankStatus.FAILED, reason=reason)
    assert_never(state)


def transfer_of(state: Voting) -> TransferProgress | None:
    """Returns the transfer that belongs to the state, if one was started."""
    match state:
        case (
            Transferring(progress)
            | Staged(progress, _)
            | Failed(_, _, TransferProgress() as progress)
        ):
            return progress
    return None


def outcome_key(state: Voting) -> str:
    """Returns the key of what the next vote settles: one for the start, one for each commit.

    The key of a commit has the number of chunks that are committed already, which is equal on all
    ranks. The start has its own key because a rank must not stay out of it: the exchange of its
    peers would be unmatched, which fails their communicator.
    """
    progress = transfer_of(state)
    return START_TRANSFER if progress is None else f"commit/{progress.chunks_committed}"


def last_progress_step(state: Voting) -> int:
    """Returns the last boundary at which all ranks made progress."""
    progress = transfer_of(state)
    return state.rebalance.opened_at if progress is None else progress.last_progress_step


def running_work(state: Voting) -> tuple[JobHandle[Any], ...]:
    """Returns the jobs that still run, and own buffers, when the rebalance is aborted."""
    match state:
        case Planning(_, plan) | Failed(_, _, Planning(_, plan)):
            return (plan,)
        case Failed(_, _, Draining(work)):
            return work
    progress = transfer_of(state)
    return () if progress is None else progress.in_flight


def copies_committed(state: Voting) -> int:
    """Counts the copies between ranks that are committed when the rebalance is aborted."""
    progress = transfer_of(state)
    return (
        0
        if progress is None
        else progress.proposal.migration.remote_copies_in(progress.chunks_committed)
    )
