"""The states of the engine, one frozen type each, and what follows from each of them.

    Idle -> Planning -> Proposed -> Transferring <-> Staged -> Idle     (staged path)
                        Proposed -> Updating -> Idle                    (in-place path)
            any state that votes -> Draining -> Idle                    (abort)

A state changes only at a boundary (between two steps), and on verdicts that all ranks reach from
the same ballots at the same boundary. The one exception is local progress within a rebalance:
Planning becomes Proposed, and Transferring becomes Staged, when this rank's own work is done; until
all ranks are there the verdict is `Pending`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from equipoise.balancer.experts.agreement.ballot import Ballot, RankStatus
from equipoise.balancer.experts.planning.proposal import Proposal, StagedProposal
from equipoise.balancer.experts.runtime.jobs import JobHandle
from equipoise.balancer.experts.transfer.p2p import ReadyChunk


@dataclass(frozen=True)
class Idle:
    """No epoch is open; loads are collected."""


@dataclass(frozen=True)
class RebalanceId:
    """Number of an epoch, and the boundary at which it was opened."""

    number: int
    opened_at: int


@dataclass(frozen=True)
class Planning:
    """The planner runs beside the forward."""

    rebalance: RebalanceId
    job: JobHandle[Proposal]


@dataclass(frozen=True)
class Proposed:
    """This rank has its proposal, and waits for everybody's."""

    rebalance: RebalanceId
    proposal: Proposal


class TransferPath(Protocol):
    """Brings what travels into slots, as the ranks agree."""

    def poll(self, voyage: "TransferProgress") -> "InTransfer | Failed":
        """What this rank's own part has become."""
        ...

    def commit(self, state: "Staged", lots: int, step: int) -> "Transferring | Finished":
        """The next `lots` lots are staged everywhere, and are right."""
        ...


@dataclass(frozen=True)
class TransferProgress:
    """How far the weights of an epoch have come.

    Attributes:
        path: on which they travel.
        rebalance: whose they are.
        proposal: what is being installed.
        chunks_committed: lots that are installed.
        last_progress_step: the boundary of the last commit, or of the agreement.
        in_flight: those behind them that were let go, in order: on the way, or staged.
    """

    path: TransferPath
    rebalance: RebalanceId
    proposal: StagedProposal
    chunks_committed: int
    last_progress_step: int
    in_flight: tuple[JobHandle[ReadyChunk], ...]


@dataclass(frozen=True)
class Transferring:
    """Weights travel to staging beside the forward; all that is staged here is committed."""

    progress: TransferProgress

    @property
    def rebalance(self) -> RebalanceId:
        """Whose weights travel."""
        return self.progress.rebalance


@dataclass(frozen=True)
class Staged:
    """The first lots are staged on this rank, which waits for everybody's."""

    progress: TransferProgress
    ready_chunks: tuple[ReadyChunk, ...]

    @property
    def rebalance(self) -> RebalanceId:
        """Whose weights are staged."""
        return self.progress.rebalance


@dataclass(frozen=True)
class Draining:
    """The epoch was aborted, but its work still runs and owns its buffers."""

    work: tuple[JobHandle[Any], ...]

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return all(task.done() for task in self.work)


class InPlaceUpdate(Protocol):
    """Rewrites layers, step by step, in a count that all ranks keep alike."""

    def advance(self, state: "Updating", step: int) -> "Updating | Finished":
        """The next boundary of an update that nobody votes on."""
        ...


@dataclass(frozen=True)
class Updating:
    """Layers are being rewritten in place, a group a step; nothing is left to agree on.

    Attributes:
        path: that rewrites them.
        rebalance: whose weights are written.
        proposal: what is being installed.
        first_step: the boundary at which the first group was handed over.
        writes: the groups that were handed over, in order.
    """

    path: InPlaceUpdate
    rebalance: RebalanceId
    proposal: Proposal
    first_step: int
    writes: tuple[JobHandle[None], ...]


@dataclass(frozen=True)
class Finished:
    """Everything is installed; ends the epoch at the boundary at which it is reached.

    Attributes:
        rebalance: which ends.
        layers: whose placement it changed; none where the plan left everything in its place.
        copies: that a rank did not hold, over all ranks.
    """

    rebalance: RebalanceId
    layers: int
    copies: int


@dataclass(frozen=True)
class RebalanceReport:
    """How an epoch ended, at the boundary before `step`.

    Attributes:
        number: of the epoch.
        opened_at: the boundary at which its load window was closed.
        step: the boundary at which it ended.
        outcome: `committed`, `unchanged` where the plan left every slot as it was, or the reason
            of the abort.
        copies: copies that the receiving ranks did not hold, over all ranks, that were committed.
        bytes: their size.
    """

    number: int
    opened_at: int
    step: int
    outcome: str
    copies: int
    bytes: int


@dataclass(frozen=True)
class Failed:
    """This rank cannot go on with the epoch, and says so on its next ballot.

    Attributes:
        rebalance: that it is barred from.
        reason: what it says.
        within: what it was about: a plan, a voyage, or work of an epoch before.
    """

    rebalance: RebalanceId
    reason: str
    within: Planning | TransferProgress | Draining


InTransfer = Transferring | Staged
Voting = Planning | Proposed | InTransfer | Failed
"""States in which every boundary has a vote."""
State = Idle | Voting | Updating | Draining


START_TRANSFER = "move"
"""What the first votes of an epoch may settle."""


def ballot_of(state: Voting) -> Ballot:
    """What a rank in this state says."""
    match state:
        case Planning():
            return Ballot(RankStatus.PLANNING)
        case Proposed(_, proposal):
            return Ballot(RankStatus.PROPOSED, proposal.digest)
        case Transferring(voyage):
            return Ballot(RankStatus.TRANSFERRING, voyage.proposal.digest)
        case Staged(voyage, staged):
            return Ballot(
                RankStatus.TRANSFERRING,
                voyage.proposal.digest,
                tuple(lot.checksum for lot in staged),
            )
        case Failed(_, reason, _):
            return Ballot(RankStatus.FAILED, reason=reason)
    assert_never(state)


def transfer_of(state: Voting) -> TransferProgress | None:
    """The voyage that the state is about, if weights were let go."""
    match state:
        case Transferring(voyage) | Staged(voyage, _) | Failed(_, _, TransferProgress() as voyage):
            return voyage
    return None


def outcome_of(state: Voting) -> str:
    """What the next vote may settle: one question for the move, and one for each commit.

    A commit's question is named by the lots that are committed already, alike on every rank. The
    move has one of its own because staying out of it would harm: the peers' exchange would be
    unmatched, which fails their communicator.
    """
    voyage = transfer_of(state)
    return START_TRANSFER if voyage is None else f"commit/{voyage.chunks_committed}"


def last_progress_step(state: Voting) -> int:
    """The last boundary at which the ranks came on together."""
    voyage = transfer_of(state)
    return state.rebalance.opened_at if voyage is None else voyage.last_progress_step


def running_work(state: Voting) -> tuple[JobHandle[Any], ...]:
    """What still runs when the epoch is left, and owns its buffers."""
    match state:
        case Planning(_, plan) | Failed(_, _, Planning(_, plan)):
            return (plan,)
        case Failed(_, _, Draining(work)):
            return work
    voyage = transfer_of(state)
    return () if voyage is None else voyage.in_flight


def copies_of(state: Voting) -> int:
    """Copies between ranks, over all of them, that are committed when the epoch is left."""
    voyage = transfer_of(state)
    return (
        0 if voyage is None else voyage.proposal.migration.remote_copies_in(voyage.chunks_committed)
    )
