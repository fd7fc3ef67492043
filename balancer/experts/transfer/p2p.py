"""Transfers expert weights between ranks, into staging, overlapped with the forward pass.

Buffers: messages and checksums are made and used on the copy stream; a message belongs to one
round, and what is launched on it and the round's work hold it no longer than they need it (K1);
staging belongs to a chunk from its first unpack until its commit has run on the compute stream.
Source slots are leased by the protocol: no layer is committed anywhere before every rank has staged
it, that is, has read all it needs of it.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from equipoise.balancer.experts.agreement.ballot import MASK64, ChunkChecksum
from equipoise.balancer.experts.planning.migration import LocalCopies, RankTransfers, RoundTransfers
from equipoise.balancer.experts.routing.layer_update import LayerUpdate
from equipoise.balancer.experts.runtime.events import NO_EVENTS, EventSink, TraceSpan, Track, now
from equipoise.balancer.experts.runtime.jobs import Job, WorkDone, stream_idle
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator, Exchange, PeerBuffer
from equipoise.hal.slots import SlotStore
from equipoise.hal.stream import Event, Role
from equipoise.hal.work import Work

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedChunk:
    """A lot that this rank has staged.

    Attributes:
        sent: sum of the fingerprints of what was read here, modulo 2**64.
        received: sum of the fingerprints of what was staged here.
        copies: (staging, local slot) pairs, to be committed.
        bytes_received: bytes that came from other ranks.
    """

    sent: int
    received: int
    copies: tuple[tuple[int, int], ...]
    bytes_received: int


@dataclass
class _ChunkState:
    """All that a lot keeps alive until it is staged.

    Attributes:
        sent: checksums of the slots read, by what they are a parcel of.
        received: checksums of the staging filled.
        copies: what is to be committed.
        bytes_received: bytes that came from other ranks.
    """

    sent: list[tuple[str, Tensor]] = field(default_factory=list)
    received: list[tuple[str, Tensor]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    bytes_received: int = 0


@dataclass(frozen=True)
class _RoundInFlight:
    """A round under way: where what is received lands."""

    transfers: RoundTransfers
    message: Tensor | None
    work: Work


class P2PTransfer:
    """Stages lots for one rank, on the copy stream.

    Args:
        accelerator: whose copy stream and memory are used.
        communicator: used for nothing else.
        store: this rank's slots, numbered layer * slots_per_rank + local slot.
        ranks: the numbers on the control plane of those who use the communicator.
        deadline: seconds that packing may take where the host has to wait for it.
        journal: told of each round, from the wait for it to when it is unpacked.
        parcel: slots that are packed at once where they stay on this rank; what travels comes in
            parcels already.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        store: SlotStore,
        ranks: Sequence[int],
        deadline: float,
        journal: EventSink = NO_EVENTS,
        parcel: int = 16,
    ) -> None:
        self._slots_per_message = parcel
        self._accelerator = accelerator
        self._communicator = communicator
        self._store = store
        self._ranks = tuple(ranks)
        self._timeout = deadline
        self._copy = accelerator.stream(Role.COPY)
        self._sink = journal

    def stage(self, leg: RankTransfers, after: Event) -> Job[StagedChunk]:
        """Begin to stage a lot; the result goes on with it, on any thread.

        Where two communicators do not progress independently, everything that the lot issues is
        issued here, by the thread that issues everything else (P4); elsewhere nothing is.

        Args:
            leg: what this rank does for the lot.
            after: recorded on the compute stream behind the last commit.

        Raises, as its result does:
            CommunicatorError, StreamError: the lot cannot be staged.
        """
        self._copy.wait(after)
        if self._communicator.capabilities.independent_groups:
            return self._stage_in_turn(leg)
        hold = _ChunkState()
        packed = deque(self._pack(part, hold) for part in leg.rounds)
        if not self._communicator.capabilities.stream_ordered:
            stream_idle(self._accelerator, self._copy).wait(self._timeout)
        rounds = deque(self._start_round(part, packed.popleft()) for part in leg.rounds)
        return self._stage_all_at_once(leg, hold, rounds)

    @property
    def can_rebuild(self) -> bool:
        """Whether the communicator can be built again beside the forward.

        Where groups do not progress independently that would come between the step's own operations
        at another place on every rank (P4); there it stays failed until `reconfigure`.
        """
        found = self._communicator.capabilities
        return found.rebuild and found.independent_groups

    def rebuild_communicator(self) -> Job[None]:
        """Build the communicator again, as all ranks do behind a move that failed."""
        yield from ()
        try:
            self._communicator.rebuild(self._ranks)
        except Exception as error:  # said here: nobody asks what became of an aborted epoch's work
            LOG.warning("moves fail until their communicator is built again: %s", error)

    def _stage_in_turn(self, leg: RankTransfers) -> Job[StagedChunk]:
        """Round after round, each as soon as the one before has arrived."""
        hold = _ChunkState()
        for part in leg.rounds:
            yield from self._round(part, hold)
        return (yield from self._finish_chunk(leg, hold))

    def _round(self, part: RoundTransfers, hold: _ChunkState) -> Job[None]:
        """From packing to unpacking; a generator of its own, so that its blobs end with it."""
        packed = self._pack(part, hold)
        if not self._communicator.capabilities.stream_ordered:
            yield stream_idle(self._accelerator, self._copy)
        yield from self._receive_round(self._start_round(part, packed), hold)

    def _stage_all_at_once(
        self, leg: RankTransfers, hold: _ChunkState, passages: deque[_RoundInFlight]
    ) -> Job[StagedChunk]:
        """What is left to do where all rounds are under way; each is let go when it has arrived."""
        while passages:
            yield from self._receive_round(passages.popleft(), hold)
        return (yield from self._finish_chunk(leg, hold))

    def _receive_round(self, passage: _RoundInFlight, hold: _ChunkState) -> Job[None]:
        """Wait for a round, and fill staging with what it has brought."""
        begin = now()
        yield WorkDone(passage.work)
        self._unpack(passage, hold)
        details = _details(passage.transfers)
        self._sink.emit(TraceSpan("round", Track.COPY, begin, now(), details))

    def _pack(self, part: RoundTransfers, hold: _ChunkState) -> Tensor | None:
        """Read what this rank sends in a round."""
        if part.send is None:
            return None
        return self._read(part.send.slots, _name(self._rank, part.send.peer), hold)

    def _read(self, slots: Sequence[int], name: str, hold: _ChunkState) -> Tensor:
        blob = self._empty_message(len(slots))
        marks = self._empty(len(slots), torch.int64)
        self._store.checksum_slots(slots, marks, self._copy)
        self._store.pack(slots, blob, self._copy)
        hold.sent.append((name, marks))
        return blob

    def _start_round(self, part: RoundTransfers, packed: Tensor | None) -> _RoundInFlight:
        """Let a round travel: at most one blob to a peer, and one from a peer."""
        sends = () if part.send is None else (_message(part.send.peer, packed),)
        blob = None if part.receive is None else self._empty_message(len(part.receive.slots))
        receives = () if part.receive is None else (_message(part.receive.peer, blob),)
        with self._copy.current():
            work = self._communicator.exchange(Exchange(sends=sends, receives=receives))
        return _RoundInFlight(part, blob, work)

    def _unpack(self, passage: _RoundInFlight, hold: _ChunkState) -> None:
        """Fill staging with what a round has brought."""
        arrived, blob = passage.transfers.receive, passage.message
        if arrived is None or blob is None:
            return
        passage.work.wait(self._copy)
        name = _name(arrived.peer, self._rank)
        self._stage(blob, arrived.staging, arrived.slots, name, hold)
        hold.bytes_received += blob.numel()

    def _stage(
        self,
        blob: Tensor,
        staging: Sequence[int],
        slots: Sequence[int],
        name: str,
        hold: _ChunkState,
    ) -> None:
        marks = self._empty(len(staging), torch.int64)
        self._store.unpack(blob, staging, self._copy)
        self._store.checksum_staging(staging, marks, self._copy)
        hold.copies += zip(staging, slots, strict=True)
        hold.received.append((name, marks))

    def _finish_chunk(self, leg: RankTransfers, hold: _ChunkState) -> Job[StagedChunk]:
        """Copies within this rank, then the end of everything on the copy stream."""
        for first in range(0, len(leg.local.slots), self._slots_per_message):
            if first:
                yield stream_idle(self._accelerator, self._copy)  # no two blobs are there at once
            self._copy_local(leg.local, slice(first, first + self._slots_per_message), hold)
        yield stream_idle(self._accelerator, self._copy)
        return StagedChunk(
            sent=checksum_sum(hold.sent),
            received=checksum_sum(hold.received),
            copies=tuple(hold.copies),
            bytes_received=hold.bytes_received,
        )

    def _copy_local(self, local: LocalCopies, part: slice, hold: _ChunkState) -> None:
        """A parcel of what stays on this rank."""
        name = _name(self._rank, self._rank)
        blob = self._read(local.sources[part], name, hold)
        self._stage(blob, local.staging[part], local.slots[part], name, hold)

    @property
    def _rank(self) -> int:
        return self._communicator.rank

    def _empty_message(self, slots: int) -> Tensor:
        return self._empty(slots * self._store.layout.slot_bytes, torch.uint8)

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        with self._copy.current(), torch.inference_mode(False):
            return torch.empty(count, dtype=dtype, device=self._accelerator.device)


def _name(source: int, destination: int) -> str:
    return f"{source}>{destination}"


def _details(leg: RoundTransfers) -> dict[str, object]:
    """Whom a round is with, and how many slots go each way."""
    details: dict[str, object] = {}
    if leg.send is not None:
        details |= {"to": leg.send.peer, "sent": len(leg.send.slots)}
    if leg.receive is not None:
        details |= {"from": leg.receive.peer, "received": len(leg.receive.slots)}
    return details


def _message(peer: int, blob: Tensor | None) -> PeerBuffer:
    assert blob is not None
    return PeerBuffer(peer, blob)


def checksum_sum(marks: Sequence[tuple[str, Tensor]]) -> int:
    """Sum, modulo 2**64, of the fingerprints of parcels: (name, checksums of its slots)."""
    return sum(message_checksum(name, checksums) for name, checksums in marks) & MASK64


def message_checksum(name: str, checksums: Tensor) -> int:
    """64 bits for a parcel: who sends it to whom, and the checksums, int64 [n], of its slots."""
    words = checksums.cpu().numpy().astype("<i8").tobytes()
    return int.from_bytes(blake2b(name.encode() + words, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class ReadyChunk:
    """All that a commit of a lot needs, and what the vote on it compares.

    Attributes:
        staged: where its weights are.
        layer_update: placement, shares and tables of its layers.
        checksum: for the ballot.
    """

    staged: StagedChunk
    layer_update: LayerUpdate
    checksum: ChunkChecksum

    def trace_fields(self) -> dict[str, object]:
        """Its layers, and what came to this rank."""
        size = {"copies": len(self.staged.copies), "bytes received": self.staged.bytes_received}
        return {**self.layer_update.trace_fields(), **size}


def stage_chunk(staging: Job[StagedChunk], change: LayerUpdate) -> Job[ReadyChunk]:
    """Stage a lot, and say what the ballot says of it."""
    staged = yield from staging
    return ReadyChunk(staged, change, ChunkChecksum(staged.sent, staged.received, change.digest))
