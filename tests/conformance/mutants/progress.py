"""Mutants of family *progress*."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import network_with

from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.event import VirtualRecording
from equipoise.backends.virtual.network import VirtualGroup
from equipoise.backends.virtual.operation import Outbox, OutboxItem, Pair, VirtualOperation
from equipoise.backends.virtual.profiles import (
    LinkingCommunicator,
    LinkingOutbox,
    LinkSetup,
    SerialCommunicator,
    SerialNetwork,
)
from equipoise.backends.virtual.transfer import Collective, CollectiveKind, Contribution
from equipoise.backends.virtual.work import DEADLINE, VirtualWork
from equipoise.hal.communicator import Exchange
from equipoise.hal.errors import CommunicatorFailed, OperationTimeout
from equipoise.hal.stream import Stream


class SendsBlock(VirtualCommunicator):
    """A receive is not posted while an earlier send of the rank has not ended."""

    def may_start(self, item: OutboxItem) -> bool:
        if not isinstance(item, VirtualOperation) or not item.what.startswith("irecv"):
            return super().may_start(item)
        pending = self._pending()
        earlier = pending[: pending.index(item)] if item in pending else []
        held_up = any(op.what.startswith("isend") and not op.ended for op in earlier)
        return super().may_start(item) and not held_up


class LastInFirstOut(VirtualGroup):
    """A receive takes the latest message."""

    def _match(self, pair: Pair) -> None:
        meeting = self._meetings[pair]
        meeting.sends = deque(reversed(meeting.sends))
        super()._match(pair)
        meeting.sends = deque(reversed(meeting.sends))


class SecondThreadOvertakes(Outbox):
    """A rank's second thread has a queue of its own, which is served first."""

    def push(self, item: OutboxItem) -> None:
        if self._communicator.world.host:
            self._items.appendleft(item)
        else:
            self._items.append(item)


class EmptyIsAwaited(VirtualCommunicator):
    """Empty blobs are received, but not sent."""

    def exchange(self, round: Exchange) -> VirtualWork:
        sends = [(buffer.peer, buffer.blob) for buffer in round.sends if buffer.blob.numel()]
        receives = [(buffer.peer, buffer.blob) for buffer in round.receives]
        return self._messages("exchange", sends, receives)


class WarmsInItsOwnOrder(LinkingCommunicator):
    """Warming builds anew, in an order that depends on the rank."""

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        for link in sorted({(min(link), max(link)) for link in links}, reverse=self.rank % 2 > 0):
            if self.rank in link:
                self.outbox.push(_new_setup(link))


def _new_setup(link: Pair) -> LinkSetup:
    """A link between the same ends that is not there yet."""
    return LinkSetup((*link, *link))  # type: ignore[arg-type]


class NotBehindTheStream(VirtualCommunicator):
    """Operations start at once, whatever was launched before on the current stream."""

    def _after(self) -> VirtualRecording | None:
        return None


class NobodyWaits(VirtualWork):
    """A stream does not wait."""

    def wait(self, stream: Stream) -> None:
        """Nothing."""


class HostWaits(VirtualWork):
    """The host waits in the stream's place."""

    def wait(self, stream: Stream) -> None:
        operation = self._operation
        if not operation.communicator.world.until(lambda: operation.ended, DEADLINE):
            raise OperationTimeout(f"the host waited for {operation.what} until its deadline")
        operation.check()


class NoSnapshot(Collective):
    """Results of copying collectives are written while the inputs are still being read."""

    def reading(self, share: Contribution) -> Iterator[Callable[[], object]]:
        if share.kind not in (
            CollectiveKind.ALL_GATHER,
            CollectiveKind.REDUCE_SCATTER,
            CollectiveKind.ALL_TO_ALL,
        ):
            yield from super().reading(share)
        share.snapshot = share.source if not len(share.snapshot) else share.snapshot


class OpeningNeedsEverybodyStill(VirtualCommunicator):
    """A rank cannot open what another member has closed in the meantime."""

    def _join(self, members: tuple[int, ...]) -> None:
        super()._join(members)
        if self._group in getattr(self.world, "left", []):
            raise CommunicatorFailed(f"a member of {self.purpose!r} closed the connection")

    def close(self) -> None:
        super().close()
        self.world.left = [*getattr(self.world, "left", []), self._group]  # type: ignore[attr-defined]


MUTANTS = (
    Mutant(
        name="receives-wait-for-earlier-sends",
        clause="P1",
        broken="On one queue a send that is not met holds up the receive behind it "
        "(PyTorch #108378).",
        property="sends-need-not-wait-for-receives",
        subject=network_with(communicator=SendsBlock),
    ),
    Mutant(
        name="the-latest-message-is-received-first",
        clause="P2",
        broken="Of two messages between the same ranks, the second can arrive as the first.",
        property="messages-between-two-ranks-keep-their-order",
        subject=network_with(group=LastInFirstOut),
        # all of them have several messages between the same ranks in flight
        also=(
            "threads-take-turns-on-one-communicator",
            "a-fault-ends-what-depends-on-it-and-nothing-else",
            "every-collective-equals-its-definition",
            "many-messages-in-flight-match-in-order",
            "long-messages-arrive-whole",
            "a-communicator-serves-hundreds-of-operations",
            "layouts-are-copied-right-or-rejected",
        ),
    ),
    Mutant(
        name="communicators-take-turns",
        clause="P4",
        broken="One communicator's operation holds up the other's (NCCL #783), undeclared.",
        property="communicators-progress-independently",
        subject=network_with(network=SerialNetwork, communicator=SerialCommunicator),
        # It works on with another communicator.
        also=("dropping-a-work-waits-for-no-peer",),
    ),
    Mutant(
        name="a-second-thread-overtakes",
        clause="P6",
        broken="What another thread issued earlier comes later.",
        property="threads-take-turns-on-one-communicator",
        subject=network_with(outbox=SecondThreadOvertakes),
    ),
    Mutant(
        name="empty-blobs-are-awaited-but-not-sent",
        clause="X1",
        broken="Empty blobs are skipped on one side only (vLLM).",
        property="a-round-brings-every-blob-whole",
        subject=network_with(communicator=EmptyIsAwaited),
        # both draw rounds of empty blobs, as they draw all else
        also=(
            "every-dtype-and-shape-is-transported",
            "unsupported-calls-raise-before-any-side-effect",
        ),
    ),
    Mutant(
        name="links-are-warmed-in-an-order-of-the-ranks-own",
        clause="X2",
        broken="Links block until both ends come, and ranks come in different orders (HCCL).",
        property="links-warmed-in-one-order-carry-traffic",
        subject=network_with(outbox=LinkingOutbox, communicator=WarmsInItsOwnOrder),
        # its ranks may have warmed links, too
        also=("operations-are-ordered-after-the-current-stream",),
    ),
    Mutant(
        name="operations-overtake-the-current-stream",
        clause="X6",
        broken="A message is read before the launch that writes it, though order is declared.",
        property="operations-are-ordered-after-the-current-stream",
        subject=network_with(communicator=NotBehindTheStream),
    ),
    Mutant(
        name="a-stream-does-not-wait-for-an-operation",
        clause="X7",
        broken="wait does nothing: the stream reads before the bytes are there.",
        property="a-stream-waits-for-an-operation-without-the-host",
        subject=network_with(work=NobodyWaits),
        also=("a-stream-that-waits-for-a-failed-work-fails",),  # it hears of a failure by waiting
    ),
    Mutant(
        name="the-host-waits-in-the-streams-place",
        clause="X7",
        broken="Only the host can wait for an operation (NIXL #2198).",
        property="a-stream-waits-for-an-operation-without-the-host",
        subject=network_with(work=HostWaits),
    ),
    Mutant(
        name="an-opening-fails-once-a-member-has-left",
        clause="X8",
        broken="A rank that is still connecting is cut off by one that is through and leaves.",
        property="a-rank-may-close-what-it-has-just-opened",
        subject=network_with(communicator=OpeningNeedsEverybodyStill),
        also=("closing-ends-what-is-in-flight",),  # its ranks close while others still open
    ),
    Mutant(
        name="results-overwrite-what-is-still-read",
        clause="A3",
        broken="Where output overlaps input, later parts are made from earlier results.",
        property="overlapping-operands-are-as-good-as-separate-ones-or-refused",
        subject=network_with(collective=NoSnapshot),
    ),
)
