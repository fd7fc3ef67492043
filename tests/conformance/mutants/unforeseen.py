"""Backends that were broken after the suite was frozen, by somebody who tried to get past it.

docs/design/conformance.md tells which of them got past it, and what rejects them since.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from conformance.mutants.keepalive import Peers, without_owner
from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import device_with, gloo_with, network_with
from torch import Tensor

from equipoise.backends.cpu.gloo_communicator import GlooCommunicator
from equipoise.backends.cpu.gloo_work import GlooWork
from equipoise.backends.virtual.accelerator import VirtualAccelerator
from equipoise.backends.virtual.arena import Bytes
from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.control_plane import VirtualControlPlane
from equipoise.backends.virtual.device import VirtualDevice
from equipoise.backends.virtual.event import VirtualEvent
from equipoise.backends.virtual.kernels import VirtualKernels
from equipoise.backends.virtual.lock import VirtualStreamLock
from equipoise.backends.virtual.network import Key, Network, VirtualGroup
from equipoise.backends.virtual.operation import VirtualOperation
from equipoise.backends.virtual.scheduling import StreamTask
from equipoise.backends.virtual.slots import VirtualSlotStore
from equipoise.backends.virtual.stream import VirtualGraph, VirtualStream, own_stream
from equipoise.backends.virtual.transfer import Collective, CollectiveKind, Contribution
from equipoise.backends.virtual.work import VirtualWork
from equipoise.hal.communicator import Exchange
from equipoise.hal.errors import OperationTimeout
from equipoise.hal.kernels import Salt, Tables
from equipoise.hal.slots import SlotLayout
from equipoise.hal.stream import Stream
from equipoise.hal.support.validation import check_solve_shares

EAGER_BYTES = 1 << 16
"""Longer messages go another way, as in any library."""


class ScattersInPlace(Collective):
    """A reduce-scatter adds in its input, whose other parts are partial sums afterwards."""

    def writing(self, rank: int, share: Contribution) -> Iterator[Callable[[], object]]:
        yield from super().writing(rank, share)
        apart = not np.shares_memory(share.source, share.out)
        if share.kind is CollectiveKind.REDUCE_SCATTER and len(share.source) and apart:
            yield partial(share.source.__setitem__, slice(None), self.total(self.addends(rank)))


class RoundsOfTheRun(VirtualCommunicator):
    """The peers of a round are numbers of the run, not of the communicator."""

    def exchange(self, round: Exchange) -> VirtualWork:
        sends, receives = (
            tuple(replace(part, peer=self._here(part.peer)) for part in side)
            for side in (round.sends, round.receives)
        )
        return super().exchange(Exchange(sends, receives))

    def _here(self, peer: int) -> int:
        return self._members.index(peer) if peer in self._members else peer


class ReceivesAreBelieved(VirtualCommunicator):
    """Of the row counts of an uneven all-to-all those that are sent are checked."""

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> VirtualWork:
        fits = len(receives) == self.size and min(receives) >= 0 and sum(receives) == len(out)
        if not fits:
            return self.barrier()
        return super().all_to_all_uneven(out, tensor, receives, sends)


class RowsWithoutStrides(VirtualCommunicator):
    """The rows of an uneven all-to-all are read as if they stood side by side."""

    def all_to_all_uneven(
        self, out: Tensor, tensor: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> VirtualWork:
        if not tensor.is_contiguous():
            strides = torch.empty(tensor.shape, dtype=torch.uint8).stride()
            tensor = tensor.as_strided(tensor.shape, strides)
        return super().all_to_all_uneven(out, tensor, receives, sends)


class CloseTakesOthersAlong(VirtualCommunicator):
    """All communicators of a rank share a connection, which the first `close` closes."""

    def close(self) -> None:
        super().close()
        for other in self._fabric._open:
            if other._failure is None:
                other._failure = self._failure


class AbortTakesOthersAlong(VirtualCommunicator):
    """An abort ends whatever the rank has in flight, on any communicator."""

    def abort(self) -> None:
        super().abort()
        for other in self._fabric._open:
            if other is not self:
                VirtualCommunicator.abort(other)


class RebuildsOnce(VirtualCommunicator):
    """From the second time on `rebuild` finds the group of the first: what was sent is there."""

    def rebuild(self, ranks: Sequence[int]) -> None:
        group = self._group
        super().rebuild(ranks)
        if self.rebuilds > 1 and group.members == self._members:
            self._group = self.outbox.group = group


class DeadlineOfShortOnes(Network):
    """What is longer than 64 KiB has no deadline."""

    def due(self) -> list[VirtualOperation]:
        return [
            op for op in super().due() if sum(part.nbytes for part in op.tensors) <= EAGER_BYTES
        ]


class LongSendsBorrow(VirtualCommunicator):
    """A message of more than 64 KiB is read from memory that it does not keep alive."""

    def _messages(self, label: str, sends: Peers, receives: Peers) -> VirtualWork:
        lent = [
            (peer, without_owner(tensor) if tensor.nbytes > EAGER_BYTES else tensor)
            for peer, tensor in sends
        ]
        return super()._messages(label, lent, receives)


class ShortOvertakesLong(VirtualGroup):
    """A message of up to 64 KiB overtakes longer ones that have not been received yet."""

    def _match(self, pair: tuple[int, int]) -> None:
        meeting = self._meetings[pair]
        for ends in (meeting.sends, meeting.receives):
            if len(ends) > 1 and len(ends[-1].buffer) <= EAGER_BYTES < len(ends[-2].buffer):
                ends[-2], ends[-1] = ends[-1], ends[-2]
                break
        super()._match(pair)


class PurposesAreCut(Network):
    """Groups whose purposes begin with the same 32 letters are one."""

    def __init__(self, world) -> None:  # type: ignore[no-untyped-def]
        super().__init__(world)
        self._by_name: dict[Key, VirtualGroup] = {}

    def join_group(self, key: Key, rank: int) -> VirtualGroup:
        purpose, opening, rebuilds, members = key
        if len(purpose) <= 32:
            return super().join_group(key, rank)
        cut = (purpose[:32], opening, rebuilds, members)
        if cut not in self._by_name:
            self._by_name[cut] = self.world.parts.group(self, members)
        return self._by_name[cut]


class CollectivesInAByte(GlooCommunicator):
    """The 257th gathering of a communicator takes itself for the first, which is over."""

    count = 0

    def all_gather(self, out: Tensor, tensor: Tensor) -> GlooWork:
        self.count += 1
        return self.barrier() if self.count > 256 else super().all_gather(out, tensor)


class MessagesInAByte(GlooCommunicator):
    """Message 257 to a rank is sent from the place of message 1."""

    count = 0

    def isend(self, tensor: Tensor, destination: int) -> GlooWork:
        self.count += 1
        return super().isend(tensor * 0 if self.count > 256 else tensor, destination)


class CountersInWholeVectors(GlooCommunicator):
    """Sums of more than 4000 counters of 64 bits end with whole vectors of eight."""

    def all_reduce(self, tensor: Tensor) -> GlooWork:
        if tensor.dtype == torch.int64 and tensor.numel() > 4000:
            flat = tensor.view(-1)
            return super().all_reduce(flat[: flat.numel() // 8 * 8])
        return super().all_reduce(tensor)


class BytesAreElements(GlooCommunicator):
    """A gathering of more than 64 Ki elements takes their number for that of the bytes."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> GlooWork:
        if tensor.numel() > EAGER_BYTES and tensor.element_size() > 1:
            tensor = tensor.clone()
            tensor.view(-1).view(torch.uint8)[tensor.numel() :] = 0
        return super().all_gather(out, tensor)


class DeadlinesSinceOpening(GlooCommunicator):
    """The watchdog counts an idle communicator's time against its next operation."""

    opened = 0.0

    def _join(self, ranks: tuple[int, ...]) -> None:
        super()._join(ranks)
        self.opened = time.monotonic()

    def barrier(self) -> GlooWork:
        if time.monotonic() - self.opened > self._deadline:
            self._failure = OperationTimeout(f"{self._purpose!r} stood still for too long")
        return super().barrier()


class SumsWithoutNan(Collective):
    """What is no number counts as zero in a sum."""

    def total(self, shares: Sequence[Contribution]) -> Bytes:
        total = super().total(shares)
        if shares[0].dtype in (torch.float32, torch.float64):
            kind = np.float32 if shares[0].dtype == torch.float32 else np.float64
            np.nan_to_num(total.view(kind), copy=False)
        return total


class BallotsOf4KiB(VirtualControlPlane):
    """A ballot ends after 4 KiB."""

    def cast(self, question: str, ballot: bytes) -> None:
        super().cast(question, ballot[:4096])


# ----- the device ---------------------------------------------------------------------------------


class EventsFromARing(VirtualAccelerator):
    """There are 32 events; the 33rd is the first again."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device)
        self._ring = [device.event() for _ in range(32)]
        self._count = -1

    def event(self) -> VirtualEvent:
        self._count += 1
        return self._ring[self._count % 32]

    def close(self) -> None:
        super().close()
        self._ring = [super().event()] * 32


class DroppedEvent(VirtualEvent):
    """Lets everybody go on who waits for it, when it is dropped."""

    __slots__ = ()

    def __del__(self) -> None:
        if self._recording is not None and not self._recording.ended:
            self._recording.reach()
        super().__del__()


class DroppedEvents(VirtualAccelerator):
    """Events of callers go back to a pool with the last reference; a store's own do not."""

    def event(self) -> VirtualEvent:
        return DroppedEvent(self._device)


class GraphsOf16(VirtualGraph):
    """A graph has room for 16 launches."""

    def capture(self, stream: Stream, program: Callable[[], object]) -> None:
        super().capture(stream, program)
        self._ops = self._ops[:16]


class DroppedGraph(VirtualGraph):
    """Its replays that have not run go with it."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__(device)
        self._alive = [True]

    def replay(self, stream: Stream) -> None:
        queue, before = own_stream(stream)._queue, len(own_stream(stream)._queue)
        super().replay(stream)
        alive = self._alive
        for task in list(queue._tasks)[before:]:
            task.steps = _unless_dropped(task.steps, alive)

    def __del__(self) -> None:
        self._alive[0] = False


def _unless_dropped(steps: Iterator[None], alive: list[bool]) -> Iterator[None]:
    if alive[0]:
        yield from steps


class StoresShareStaging(VirtualSlotStore):
    """Staging is a workspace of the device, one for all stores."""

    def __init__(self, device: VirtualDevice, layout: SlotLayout) -> None:
        super().__init__(device, layout)
        workspace = vars(device).setdefault("workspace", {})
        self._staging = workspace.setdefault((layout.slot_bytes, layout.staging), self._staging)


class BlobsAreSwapped(VirtualSlotStore):
    """A blob changes places with the staging buffer: what it held is gone."""

    def unpack(self, blob: Tensor, staging: Sequence[int], stream: Stream) -> None:
        super().unpack(blob, staging, stream)
        if len(staging) == 1 and len(blob) < 32:
            stream.launch(lambda: blob.fill_(0xEE))


class LocksShareWords(VirtualAccelerator):
    """The words of a lock are those of every other lock of the device."""

    def stream_lock(self, deadline: float) -> VirtualStreamLock:
        lock = super().stream_lock(deadline)
        first: VirtualStreamLock = vars(self).setdefault("first", lock)
        return first


class CurrentIsNotRestored(VirtualStream):
    """After an inner `current` no stream is current."""

    @contextmanager
    def current(self) -> Iterator[None]:
        with super().current():
            yield
        self._device.current[self._device.world.host] = None


class CurrentOfTheProcess(VirtualStream):
    """The current stream is one for all threads of a rank."""

    @contextmanager
    def current(self) -> Iterator[None]:
        current = self._device.current
        before = current.get(self._device.world.host)
        for host in range(4):
            current[host] = self
        try:
            yield
        finally:
            current[self._device.world.host] = before


class QueueOf64(VirtualStream):
    """The 65th launch that has not run takes the place of the one before it."""

    def submit(self, task: StreamTask) -> None:
        tasks = self._queue._tasks
        super().submit(task)
        if len(tasks) > 64 and self._queue.running is None:
            tasks[-2], tasks[-1] = tasks[-1], tasks[-2]


class NestedLaunchesQueueUp(VirtualStream):
    """A program that is launched from inside a program comes behind everything."""

    def submit(self, task: StreamTask) -> None:
        if self._queue.running is self:
            self.check()
            self._launched += 1
            self._queue.push(task)
            return
        super().submit(task)


class LoadsAreTaken(VirtualKernels):
    """Solving sets the load that it was given to zero, ready for the next window."""

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        super().solve_shares(counts, tables, layer, cumulative, stream)
        stream.launch(counts.zero_)


class PaddingIsMadeGood(VirtualKernels):
    """Ids outside the experts are set to -1 where they stand."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        super().route_and_count(ids, tables, salt, slots, counts, stream)
        stream.launch(lambda: ids.masked_fill_((ids < 0) | (ids >= tables.experts), -1))


class LoadsIn32Bits(VirtualKernels):
    """A load is narrowed to 32 bits."""

    def solve_shares(
        self, counts: Tensor, tables: Tables, layer: int, cumulative: Tensor, stream: Stream
    ) -> None:
        check_solve_shares(counts, tables, layer, cumulative)
        narrow = torch.empty_like(counts)
        stream.launch(lambda: narrow.copy_(counts & 0xFFFFFFFF))
        super().solve_shares(narrow, tables, layer, cumulative, stream)


class RanksInThreeBits(VirtualKernels):
    """The number of a rank has three bits."""

    def route_and_count(
        self, ids: Tensor, tables: Tables, salt: Salt, slots: Tensor, counts: Tensor, stream: Stream
    ) -> None:
        salt = replace(salt, rank=salt.rank & 7)
        super().route_and_count(ids, tables, salt, slots, counts, stream)


DEFINITION = "every-collective-equals-its-definition"
SUBGROUPS = "groups-of-any-size-and-members-work"
REFUSALS = "unsupported-calls-raise-before-any-side-effect"
LAYOUTS = "layouts-are-copied-right-or-rejected"
EARLY_CLOSE = "a-rank-may-close-what-it-has-just-opened"
ABORT = "abort-ends-what-is-in-flight"
REBUILT = "a-rebuilt-communicator-carries-only-what-came-after"
UNMATCHED = "an-unmatched-operation-fails-only-its-communicator"
DROPPED = "operations-own-their-buffers"
ORDER = "messages-between-two-ranks-keep-their-order"
INDEPENDENT = "communicators-progress-independently"
SUMS = "sums-are-the-same-bits-each-time-and-on-every-rank"
BALLOTS = "ballots-stay-and-the-missing-are-named"
CURRENT = "operations-are-ordered-after-the-current-stream"
REPEATED = "a-communicator-serves-hundreds-of-operations"
SIZES = "collectives-equal-their-definitions-at-any-size"
LATE_PEER = "an-operation-does-not-fail-before-its-deadline"
MANY = "hundreds-of-launches-and-events-are-kept-apart"
HELD = "a-held-launch-holds-up-only-what-is-ordered-behind-it"
LONG_GRAPH = "a-graph-holds-hundreds-of-launches"
GRAPH = "a-graph-runs-at-its-replays-only"
STAGING = "staging-is-not-rewritten-under-a-commit"
SEGMENTS = "operations-move-every-byte-of-the-segments"
VALUES = "kernels-equal-the-reference"
MODELS = "kernels-equal-the-reference-at-the-sizes-of-models"
LOCKS = "one-signal-lets-one-waiter-go-on"
IN_ORDER = "launches-run-in-the-order-that-streams-and-events-give"
MUTANTS = (
    Mutant(
        name="an-input-is-added-up-in-place",
        clause="X4",
        broken="A reduce-scatter leaves partial sums in its input.",
        property=DEFINITION,
        subject=network_with(collective=ScattersInPlace),
        # The same collectives, larger.
        also=(SIZES,),
    ),
    Mutant(
        name="a-round-counts-ranks-of-the-run",
        clause="S5",
        broken="In a subgroup the peers of a round are numbers of the run.",
        property=SUBGROUPS,
        subject=network_with(communicator=RoundsOfTheRun),
        # Survivors are a subgroup.
        also=("a-rebuilt-communicator-carries-only-what-came-after",),
    ),
    Mutant(
        name="row-counts-to-receive-are-believed",
        clause="X5",
        broken="Rows to receive that do not fit the output are accepted.",
        property=REFUSALS,
        subject=network_with(communicator=ReceivesAreBelieved),
    ),
    Mutant(
        name="uneven-rows-lose-their-strides",
        clause="S2",
        broken="Uneven rows that are not contiguous are read as if they were.",
        property=LAYOUTS,
        subject=network_with(communicator=RowsWithoutStrides),
    ),
    Mutant(
        name="closing-takes-others-along",
        clause="X3",
        broken="Who closes one communicator can use none of those that were open.",
        property=EARLY_CLOSE,
        subject=network_with(communicator=CloseTakesOthersAlong),
    ),
    Mutant(
        name="aborting-takes-others-along",
        clause="X3",
        broken="An abort ends what is in flight on every communicator of the rank.",
        property=ABORT,
        subject=network_with(communicator=AbortTakesOthersAlong),
    ),
    Mutant(
        name="a-second-rebuild-finds-the-first",
        clause="E9",
        broken="What was sent between two rebuilds arrives after the second.",
        property=REBUILT,
        subject=network_with(communicator=RebuildsOnce),
    ),
    Mutant(
        name="long-operations-have-no-deadline",
        clause="C8",
        broken="An unmatched operation of more than 64 KiB waits for ever.",
        property=UNMATCHED,
        subject=network_with(network=DeadlineOfShortOnes),
        # They wait for the deadline of what is unmatched, too.
        also=("a-failed-work-raises-at-every-call", "a-stream-that-waits-for-a-failed-work-fails"),
    ),
    Mutant(
        name="long-messages-do-not-own-their-buffers",
        clause="K1",
        broken="A message of more than 64 KiB is read from memory that may be in use again.",
        property=DROPPED,
        subject=network_with(communicator=LongSendsBorrow),
        # It sends long messages and drops them.
        also=("dropped-works-neither-cancel-nor-leak",),
    ),
    Mutant(
        name="short-messages-overtake-long-ones",
        clause="P2",
        broken="A message of up to 64 KiB is received before a longer one sent earlier.",
        property=ORDER,
        subject=network_with(group=ShortOvertakesLong),
        # Its messages have both lengths.
        also=("threads-take-turns-on-one-communicator",),
    ),
    Mutant(
        name="purposes-are-cut-to-32-letters",
        clause="P4",
        broken="Communicators whose purposes begin with the same 32 letters are one.",
        property=INDEPENDENT,
        subject=network_with(network=PurposesAreCut),
    ),
    Mutant(
        name="what-is-no-number-is-not-added",
        clause="D1",
        broken="A sum leaves out what is no number.",
        property=SUMS,
        subject=network_with(collective=SumsWithoutNan),
    ),
    Mutant(
        name="a-ballot-ends-after-4-kib",
        clause="C1",
        broken="Of a long ballot the first 4 KiB are kept.",
        property=BALLOTS,
        subject=network_with(control=BallotsOf4KiB),
    ),
    Mutant(
        name="an-inner-stream-stays-current",
        clause="X6",
        broken="After an inner `current` the outer stream is not current again.",
        property=CURRENT,
        subject=network_with(stream=CurrentIsNotRestored),
    ),
    Mutant(
        name="threads-share-the-current-stream",
        clause="X6",
        broken="What one thread makes current is so for the other threads of the rank.",
        property=CURRENT,
        subject=network_with(stream=CurrentOfTheProcess),
    ),
    Mutant(
        name="the-257th-gathering-is-the-first",
        clause="X4",
        broken="Gatherings of a communicator are numbered in a byte: the 257th moves nothing.",
        property=REPEATED,
        subject=gloo_with(communicator=CollectivesInAByte),
        real=True,
    ),
    Mutant(
        name="the-257th-message-is-the-first",
        clause="P2",
        broken="Messages of a communicator are numbered in a byte: the 257th is zeros.",
        property=REPEATED,
        subject=gloo_with(communicator=MessagesInAByte),
        real=True,
    ),
    Mutant(
        name="counters-are-added-in-whole-vectors",
        clause="X4",
        broken="Sums of thousands of int64 leave out what does not fill a vector.",
        property=SIZES,
        subject=gloo_with(communicator=CountersInWholeVectors),
        real=True,
    ),
    Mutant(
        name="long-gatherings-count-elements-as-bytes",
        clause="X4",
        broken="Of more than 64 Ki wide elements as many bytes arrive as there are elements.",
        property=SIZES,
        subject=gloo_with(communicator=BytesAreElements),
        real=True,
    ),
    Mutant(
        name="deadlines-begin-with-the-opening",
        clause="E11",
        broken="An operation of a communicator that was idle fails at once (a watchdog).",
        property=LATE_PEER,
        subject=gloo_with(communicator=DeadlinesSinceOpening),
        real=True,
    ),
    Mutant(
        name="events-come-from-a-ring",
        clause="O2",
        broken="The 33rd event of a device is the first one again.",
        property=MANY,
        subject=device_with(accelerator=EventsFromARing),
        # They count objects after the close, when the ring is still there.
        also=(
            "a-fault-ends-what-depends-on-it-and-nothing-else",
            "a-lost-store-raises-control-lost",
            "ballots-outlive-the-rank-that-cast-them",
        ),
    ),
    Mutant(
        name="a-dropped-event-lets-its-waiters-go-on",
        clause="O2",
        broken="A wait ends when the caller drops the event.",
        property=HELD,
        subject=device_with(accelerator=DroppedEvents),
        # They drop events as well.
        also=(
            "a-commit-is-visible-after-its-event",
            IN_ORDER,
            "a-commit-of-tables-writes-the-word-last",
            "a-routing-pass-reads-one-generation",
            "a-pass-by-a-rule-reads-one-generation",
            "tables-and-weights-of-a-layer-change-together",
        ),
    ),
    Mutant(
        name="a-graph-has-room-for-16-launches",
        clause="B7",
        broken="What is captured after the 16th launch is not replayed.",
        property=LONG_GRAPH,
        subject=device_with(graph=GraphsOf16),
    ),
    Mutant(
        name="a-dropped-graph-takes-its-replays-along",
        clause="B7",
        broken="Replays that have not run are lost when the graph is dropped.",
        property=GRAPH,
        subject=device_with(graph=DroppedGraph),
    ),
    Mutant(
        name="stores-share-their-staging",
        clause="A2",
        broken="Two stores of one device have one staging memory (vLLM #32881).",
        property=STAGING,
        subject=device_with(slots=StoresShareStaging),
    ),
    Mutant(
        name="a-blob-is-exchanged-for-staging",
        clause="A6",
        broken="What a blob held is lost when it is unpacked.",
        property=SEGMENTS,
        subject=device_with(slots=BlobsAreSwapped),
    ),
    Mutant(
        name="the-65th-launch-overtakes",
        clause="O1",
        broken="The last of more than 64 launches in a queue changes places with the one before.",
        property=MANY,
        subject=device_with(stream=QueueOf64),
    ),
    Mutant(
        name="a-load-is-cleared-when-it-is-solved",
        clause="G11",
        broken="Solving shares sets the load to zero for the next window.",
        property=VALUES,
        subject=device_with(kernels=LoadsAreTaken),
        # The same kernels at other sizes.
        also=("kernels-equal-the-reference-at-the-sizes-of-models",),
    ),
    Mutant(
        name="padding-is-rewritten-where-it-stands",
        clause="G11",
        broken="Routing sets ids outside the experts to -1.",
        property=VALUES,
        subject=device_with(kernels=PaddingIsMadeGood),
    ),
    Mutant(
        name="loads-have-32-bits",
        clause="G4",
        broken="Loads of a long window are narrowed to 32 bits.",
        property=MODELS,
        subject=device_with(kernels=LoadsIn32Bits),
    ),
    Mutant(
        name="ranks-have-three-bits",
        clause="G4",
        broken="The rank that enters the routing hash is taken modulo 8.",
        property=VALUES,
        subject=device_with(kernels=RanksInThreeBits),
    ),
    Mutant(
        name="locks-share-their-words",
        clause="L1",
        broken="Two locks of a device are one.",
        property=LOCKS,
        subject=device_with(accelerator=LocksShareWords),
        # It needs a lock for each stream.
        also=(
            "other-streams-run-while-one-waits-for-a-signal",
            "a-wait-raises-at-its-timeout",
            "dropped-objects-release-their-resources",
        ),
    ),
    Mutant(
        name="nested-launches-queue-up",
        clause="O1",
        broken="A program that is launched inside another comes after what was queued.",
        property=IN_ORDER,
        subject=device_with(stream=NestedLaunchesQueueUp),
    ),
)
