"""Mutants of family *control*."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import network_with

from equipoise.backends.virtual.control_plane import VirtualControlPlane
from equipoise.backends.virtual.network import Network
from equipoise.hal.checked_communicator import CheckedCommunicator, OperationSignature
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.properties import control_checked_mode
from equipoise.hal.conformance.properties.control import FORGETTING, LOST_STORE
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.subject import Subject
from equipoise.hal.errors import BallotIncomplete, ControlPlaneLost, OrderMismatch, RankLost
from equipoise.hal.work import Work


class LastBallotCounts(VirtualControlPlane):
    """A second ballot replaces the first."""

    def cast(self, question: str, ballot: bytes) -> None:
        self._store.ballots[question, self._rank] = ballot


class SecondBallotIsIgnored(VirtualControlPlane):
    """A second ballot is dropped, and the caller believes that it counts."""

    def cast(self, question: str, ballot: bytes) -> None:
        self._store.ballots.setdefault((question, self._rank), ballot)


class OwnProposalWins(VirtualControlPlane):
    """Every rank learns what it proposed itself, as when each commits at its own step."""

    def decide(self, question: str, value: bytes) -> bytes:
        super().decide(question, value)
        return value


class LastProposalWins(VirtualControlPlane):
    """A later proposal replaces the outcome that others have learnt."""

    def decide(self, question: str, value: bytes) -> bytes:
        self._store.decisions[question] = value
        return value


class WordsGoWithTheRank(VirtualControlPlane):
    """The ballots of a rank are held by the rank."""

    def announce_exit(self, reason: str) -> None:
        for question, rank in list(self._store.ballots):
            if rank == self._rank:
                del self._store.ballots[question, rank]
        super().announce_exit(reason)


class StoreOnRankZero(Network):
    """The first rank holds the store, and takes it along."""

    def kill(self, rank: int) -> None:
        super().kill(rank)
        if rank == 0:
            self.world.store.lose()


class OneOfTheMissing(VirtualControlPlane):
    """Stops looking at the first rank that has not cast its ballot."""

    def _missing(self, question: str, ranks: Sequence[int]) -> tuple[int, ...]:
        return super()._missing(question, ranks)[:1]


class WaitingIsSilence(VirtualControlPlane):
    """Takes a rank whose operation has not ended for one without heartbeats."""

    def lost_rank(self, timeout: float) -> RankLost | None:
        for operation in self._world.network.pending:
            if operation.communicator.member != self.rank:
                return RankLost(operation.communicator.member, "fell silent", self._operation)
        return super().lost_rank(timeout)


class LossWithoutOperation(VirtualControlPlane):
    """Names the lost rank, but not the operation."""

    def lost_rank(self, timeout: float) -> RankLost | None:
        loss = super().lost_rank(timeout)
        return None if loss is None else RankLost(loss.rank, loss.reason, "an operation")


class CastsIntoTheVoid(VirtualControlPlane):
    """Sends a ballot, and never learns that it was not stored."""

    def cast(self, question: str, ballot: bytes) -> None:
        if self._reachable():
            super().cast(question, ballot)

    def _reachable(self) -> bool:
        try:
            self._world.store.check_reachable()
        except ControlPlaneLost:
            return False
        return True


class NothingIsReadAsEmpty(VirtualControlPlane):
    """What cannot be read counts as an empty ballot."""

    def collect(
        self, question: str, timeout: float, ranks: Sequence[int] | None = None
    ) -> tuple[bytes, ...]:
        try:
            return super().collect(question, timeout, ranks)
        except ControlPlaneLost:
            return (b"",) * len(range(self.size) if ranks is None else ranks)


class NothingIsReadAsMissing(VirtualControlPlane):
    """Asks until its time-out, and then blames ranks that may have cast their ballots."""

    def collect(
        self, question: str, timeout: float, ranks: Sequence[int] | None = None
    ) -> tuple[bytes, ...]:
        try:
            return super().collect(question, timeout, ranks)
        except ControlPlaneLost:
            missing = range(self.size) if ranks is None else ranks
            raise BallotIncomplete(question, tuple(missing)) from None


class DecidesAlone(VirtualControlPlane):
    """Takes its own proposal for the outcome when it cannot learn another one."""

    def decide(self, question: str, value: bytes) -> bytes:
        try:
            return super().decide(question, value)
        except ControlPlaneLost:
            return value


class SilenceIsARankThatIsLost(VirtualControlPlane):
    """Takes a store that does not answer for a peer that does not beat."""

    def lost_rank(self, timeout: float) -> RankLost | None:
        try:
            self._world.store.check_reachable()
        except ControlPlaneLost:
            return RankLost((self.rank + 1) % self.size, "fell silent", self._operation)
        return super().lost_rank(timeout)


class SizesAreNotCompared(CheckedCommunicator):
    """Compares the kinds of operations, and not how much they move."""

    def _start_if_all_match(self, mine: OperationSignature, start: Callable[[], Work]) -> Work:
        return super()._start_if_all_match(replace(mine, elements=0, sends=(), receives=()), start)


class OnlyTheFirstIsTold(CheckedCommunicator):
    """Rank 0 compares; the others rely on it, and wait."""

    def _start_if_all_match(self, mine: OperationSignature, start: Callable[[], Work]) -> Work:
        try:
            return super()._start_if_all_match(mine, start)
        except OrderMismatch:
            if self.rank == 0:
                raise
            return start()


class NobodyIsNamed(CheckedCommunicator):
    """Says that the ranks differ, and not in what."""

    def _start_if_all_match(self, mine: OperationSignature, start: Callable[[], Work]) -> Work:
        try:
            return super()._start_if_all_match(mine, start)
        except OrderMismatch:
            raise OrderMismatch(f"not all ranks issued {mine}") from None


@dataclass(frozen=True)
class CheckedNetwork:
    """The healthy network under another checked mode."""

    checked: type[CheckedCommunicator]
    inner: Subject

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def play(self, prop: Property, case: Case) -> None:
        with patch.object(control_checked_mode, "CHECKED", self.checked):
            self.inner.play(prop, case)

    def close(self) -> None:
        self.inner.close()


def checked_by(checked: type[CheckedCommunicator]) -> Callable[[], Subject]:
    return lambda: CheckedNetwork(checked, network_with()())


BALLOTS = "ballots-stay-and-the-missing-are-named"
DECISIONS = "one-decision-for-all"
ACCUSED = "a-rank-with-a-heartbeat-is-not-reported-lost"
OUTLIVES = "ballots-outlive-the-rank-that-cast-them"
FAULTS = "a-fault-ends-what-depends-on-it-and-nothing-else"
MISMATCH = "checked-ranks-are-told-of-a-mismatch"

MUTANTS = (
    Mutant(
        name="the-last-ballot-counts",
        clause="C1",
        broken="A second ballot replaces the first one, without an error.",
        property=BALLOTS,
        subject=network_with(control=LastBallotCounts),
    ),
    Mutant(
        name="a-second-ballot-is-ignored",
        clause="C1",
        broken="A second ballot is dropped without an error.",
        property=BALLOTS,
        subject=network_with(control=SecondBallotIsIgnored),
    ),
    Mutant(
        name="each-rank-commits-at-its-own-step",
        clause="C2",
        broken="Every rank is told the value that it proposed itself.",
        property=DECISIONS,
        subject=network_with(control=OwnProposalWins),
        # Ask for the outcome again, as a second proposal.
        also=(OUTLIVES, FORGETTING.name),
    ),
    Mutant(
        name="the-last-proposal-wins",
        clause="C2",
        broken="A later proposal replaces an outcome that others have learnt.",
        property=DECISIONS,
        subject=network_with(control=LastProposalWins),
        # Ask for the outcome again, as a second proposal.
        also=(OUTLIVES, FORGETTING.name),
    ),
    Mutant(
        name="words-go-with-the-rank",
        clause="C3",
        broken="The ballots of a rank that leaves are gone.",
        property=OUTLIVES,
        subject=network_with(control=WordsGoWithTheRank),
        # A rank that leaves takes what the others still read.
        also=("a-lost-store-raises-control-lost",),
    ),
    Mutant(
        name="the-store-is-on-rank-zero",
        clause="C3",
        broken="The store ends with rank 0.",
        property=OUTLIVES,
        subject=network_with(network=StoreOnRankZero),
        # What follows from a death of rank 0 is judged there, too.
        also=(FAULTS,),
    ),
    Mutant(
        name="one-of-the-missing-is-named",
        clause="C4",
        broken="Only the first rank without a ballot is named.",
        property=BALLOTS,
        subject=network_with(control=OneOfTheMissing),
        # Behind what was forgotten every ballot is missing.
        also=(FORGETTING.name,),
    ),
    Mutant(
        name="who-waits-counts-as-silent",
        clause="C5",
        broken="A rank that waits for an operation is reported lost.",
        property=ACCUSED,
        subject=network_with(control=WaitingIsSilence),
        # Queries after every fault the lost rank and its operation.
        also=(FAULTS,),
    ),
    Mutant(
        name="a-loss-without-its-operation",
        clause="C5",
        broken="A loss does not say during what it was noticed.",
        property=OUTLIVES,
        subject=network_with(control=LossWithoutOperation),
        # Queries after every fault the lost rank and its operation.
        also=(FAULTS,),
    ),
    Mutant(
        name="a-ballot-for-a-lost-store-is-dropped",
        clause="C6",
        broken="A ballot that no store takes is dropped without an error.",
        property=LOST_STORE.name,
        subject=network_with(control=CastsIntoTheVoid),
    ),
    Mutant(
        name="a-lost-store-holds-empty-ballots",
        clause="C6",
        broken="Without a store every ballot is empty.",
        property=LOST_STORE.name,
        subject=network_with(control=NothingIsReadAsEmpty),
    ),
    Mutant(
        name="a-lost-store-is-taken-for-missing-ballots",
        clause="C6",
        broken="Without a store all ranks are said not to have cast their ballots.",
        property=LOST_STORE.name,
        subject=network_with(control=NothingIsReadAsMissing),
    ),
    Mutant(
        name="each-rank-decides-without-a-store",
        clause="C6",
        broken="Without a store every rank is told its own proposal.",
        property=LOST_STORE.name,
        subject=network_with(control=DecidesAlone),
    ),
    Mutant(
        name="a-lost-store-is-taken-for-a-lost-rank",
        clause="C5",
        broken="When the store is gone, a rank that is well is reported lost.",
        property=LOST_STORE.name,
        subject=network_with(control=SilenceIsARankThatIsLost),
    ),
    Mutant(
        name="checked-sizes-are-not-compared",
        clause="C7",
        broken="Operations of one kind and of different sizes count as equal.",
        property=MISMATCH,
        subject=checked_by(SizesAreNotCompared),
    ),
    Mutant(
        name="only-the-first-rank-is-told",
        clause="C7",
        broken="Of a mismatch only rank 0 learns; the others start and wait.",
        property=MISMATCH,
        subject=checked_by(OnlyTheFirstIsTold),
    ),
    Mutant(
        name="a-mismatch-names-nobody",
        clause="C7",
        broken="A mismatch does not say what each rank issued.",
        property=MISMATCH,
        subject=checked_by(NobodyIsNamed),
    ),
)
