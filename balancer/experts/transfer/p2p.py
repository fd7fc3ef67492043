"""Transfers expert weights between ranks, into staging, overlapped with the forward pass.

Buffers: messages and checksums are allocated and used on the copy stream. A message belongs to one
round and is released as soon as its launches and the round's work allow (K1). Staging belongs to a
chunk from its first unpack until its commit has run on the compute stream. Source slots need no
lock: no layer is committed on any rank before every rank has staged it, that is, has read what it
needs.
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
    """A chunk that this rank has staged.

    Attributes:
        sent: sum of the digests of what was read here, modulo 2**64.
        received: sum of the digests of what was staged here, modulo 2**64.
        copies: (staging, local slot) pairs to commit.
        bytes_received: bytes that came from other ranks.
    """

    sent: int
    received: int
    copies: tuple[tuple[int, int], ...]
    bytes_received: int


@dataclass
class _ChunkState:
    """What a chunk keeps alive until it is staged.

    Attributes:
        sent: (message name, checksums) of the slots that were read.
        received: (message name, checksums) of the staging that was filled.
        copies: (staging, local slot) pairs to commit.
        bytes_received: bytes that came from other ranks.
    """

    sent: list[tuple[str, Tensor]] = field(default_factory=list)
    received: list[tuple[str, Tensor]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    bytes_received: int = 0


@dataclass(frozen=True)
class _RoundInFlight:
    """A round in flight, with the buffer of its received message."""

    transfers: RoundTransfers
    message: Tensor | None
    work: Work


class P2PTransfer:
    """Stages chunks for one rank, on the copy stream.

    Args:
        accelerator: its copy stream and memory are used.
        communicator: used for nothing else.
        store: this rank's slots, numbered layer * slots_per_rank + local slot.
        ranks: control-plane numbers of the ranks of the communicator.
        timeout: seconds that packing may take if the host has to wait for it.
        event_sink: receives a span of each round, from the wait for it until it is unpacked.
        slots_per_message: slots that are packed at once when they stay on this rank; messages
            between ranks are cut by the plan.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        store: SlotStore,
        ranks: Sequence[int],
        timeout: float,
        event_sink: EventSink = NO_EVENTS,
        slots_per_message: int = 16,
    ) -> None:
        self._slots_per_message = slots_per_message
        self._accelerator = accelerator
        self._communicator = communicator
        self._store = store
        self._ranks = tuple(ranks)
        self._timeout = timeout
        self._copy = accelerator.stream(Role.COPY)
        self._sink = event_sink

    def stage(self, transfers: RankTransfers, after: Event) -> Job[StagedChunk]:
        """Starts to stage a chunk; the returned job continues it, on any thread.

        Args:
            transfers: what this rank does for the chunk.
            after: an event on the compute stream after the last commit, which may still read the
                staging that this chunk fills.

        Raises, as the job does:
            CommunicatorError, StreamError: the chunk cannot be staged.
        """
        self._copy.wait(after)
        if self._communicator.capabilities.independent_groups:
            return self._stage_in_turn(transfers)
        # Two communicators that do not progress independently need the same order of operations on
        # all ranks, so this thread, which issues those of the step, issues all of the chunk here
        # (P4).
        chunk_state = _ChunkState()
        packed = deque(self._pack(part, chunk_state) for part in transfers.rounds)
        if not self._communicator.capabilities.stream_ordered:
            stream_idle(self._accelerator, self._copy).wait(self._timeout)
        rounds = deque(self._start_round(part, packed.popleft()) for part in transfers.rounds)
        return self._stage_all_at_once(transfers, chunk_state, rounds)

    @property
    def can_rebuild(self) -> bool:
        """Whether the communicator can be rebuilt, overlapped with the forward pass.

        If groups do not progress independently, a rebuild would come between the step's own
        operations at another place on every rank (P4); then it stays failed until `reconfigure`.
        """
        capabilities = self._communicator.capabilities
        return capabilities.rebuild and capabilities.independent_groups

    def rebuild_communicator(self) -> Job[None]:
        """Rebuilds the communicator, as all ranks do after a failed transfer."""
        yield from ()
        try:
            self._communicator.rebuild(self._ranks)
        except Exception as error:  # logged here: no caller reads the result
            LOG.warning("transfers fail until their communicator is rebuilt: %s", error)

    def _stage_in_turn(self, transfers: RankTransfers) -> Job[StagedChunk]:
        """Runs one round after another."""
        chunk_state = _ChunkState()
        for part in transfers.rounds:
            yield from self._round(part, chunk_state)
        return (yield from self._finish_chunk(transfers, chunk_state))

    def _round(self, part: RoundTransfers, chunk_state: _ChunkState) -> Job[None]:
        """Runs a round, from packing to unpacking."""
        # A generator of its own: its end releases the messages, before those of the next round.
        packed = self._pack(part, chunk_state)
        if not self._communicator.capabilities.stream_ordered:
            yield stream_idle(self._accelerator, self._copy)
        yield from self._receive_round(self._start_round(part, packed), chunk_state)

    def _stage_all_at_once(
        self,
        transfers: RankTransfers,
        chunk_state: _ChunkState,
        rounds_in_flight: deque[_RoundInFlight],
    ) -> Job[StagedChunk]:
        """Completes rounds in flight; each releases its messages once it is unpacked."""
        while rounds_in_flight:
            yield from self._receive_round(rounds_in_flight.popleft(), chunk_state)
        return (yield from self._finish_chunk(transfers, chunk_state))

    def _receive_round(
        self, round_in_flight: _RoundInFlight, chunk_state: _ChunkState
    ) -> Job[None]:
        """Waits for a round, then unpacks what it received."""
        begin = now()
        yield WorkDone(round_in_flight.work)
        self._unpack(round_in_flight, chunk_state)
        details = _details(round_in_flight.transfers)
        self._sink.emit(TraceSpan("round", Track.COPY, begin, now(), details))

    def _pack(self, part: RoundTransfers, chunk_state: _ChunkState) -> Tensor | None:
        """Packs the slots that this rank sends in a round."""
        if part.send is None:
            return None
        return self._pack_slots(part.send.slots, _name(self._rank, part.send.peer), chunk_state)

    def _pack_slots(self, slots: Sequence[int], name: str, chunk_state: _ChunkState) -> Tensor:
        message = self._empty_message(len(slots))
        checksums = self._empty(len(slots), torch.int64)
        self._store.checksum_slots(slots, checksums, self._copy)
        self._store.pack(slots, message, self._copy)
        chunk_state.sent.append((name, checksums))
        return message

    def _start_round(self, part: RoundTransfers, packed: Tensor | None) -> _RoundInFlight:
        """Starts a round: at most one message to a peer, and one from a peer."""
        sends = () if part.send is None else (_message(part.send.peer, packed),)
        message = None if part.receive is None else self._empty_message(len(part.receive.slots))
        receives = () if part.receive is None else (_message(part.receive.peer, message),)
        with self._copy.current():
            work = self._communicator.exchange(Exchange(sends=sends, receives=receives))
        return _RoundInFlight(part, message, work)

    def _unpack(self, round_in_flight: _RoundInFlight, chunk_state: _ChunkState) -> None:
        """Unpacks what a round received into staging."""
        receive, message = round_in_flight.transfers.receive, round_in_flight.message
        if receive is None or message is None:
            return
        round_in_flight.work.wait(self._copy)
        name = _name(receive.peer, self._rank)
        self._stage(message, receive.staging, receive.slots, name, chunk_state)
        chunk_state.bytes_received += message.numel()

    def _stage(
        self,
        message: Tensor,
        staging: Sequence[int],
        slots: Sequence[int],
        name: str,
        chunk_state: _ChunkState,
    ) -> None:
        checksums = self._empty(len(staging), torch.int64)
        self._store.unpack(message, staging, self._copy)
        self._store.checksum_staging(staging, checksums, self._copy)
        chunk_state.copies += zip(staging, slots, strict=True)
        chunk_state.received.append((name, checksums))

    def _finish_chunk(self, transfers: RankTransfers, chunk_state: _ChunkState) -> Job[StagedChunk]:
        """Copies slots that stay on this rank, then waits for the copy stream."""
        for first in range(0, len(transfers.local.slots), self._slots_per_message):
            if first:
                yield stream_idle(
                    self._accelerator, self._copy
                )  # frees the message before the next one
            self._copy_local(
                transfers.local, slice(first, first + self._slots_per_message), chunk_state
            )
        yield stream_idle(self._accelerator, self._copy)
        return StagedChunk(
            sent=checksum_sum(chunk_state.sent),
            received=checksum_sum(chunk_state.received),
            copies=tuple(chunk_state.copies),
            bytes_received=chunk_state.bytes_received,
        )

    def _copy_local(self, local: LocalCopies, part: slice, chunk_state: _ChunkState) -> None:
        """Copies some of the slots that stay on this rank, through staging."""
        name = _name(self._rank, self._rank)
        message = self._pack_slots(local.sources[part], name, chunk_state)
        self._stage(message, local.staging[part], local.slots[part], name, chunk_state)

    @property
    def _rank(self) -> int:
        return self._communicator.rank

    def _empty_message(self, slots: int) -> Tensor:
        return self._empty(slots * self._store.layout.slot_bytes, torch.uint8)

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        # Engines call in inference mode; other threads could not write tensors that are made in it.
        with self._copy.current(), torch.inference_mode(False):
            return torch.empty(count, dtype=dtype, device=self._accelerator.device)


def _name(source: int, destination: int) -> str:
    return f"{source}>{destination}"


def _details(transfers: RoundTransfers) -> dict[str, object]:
    """Returns the peers of a round, and the slots sent and received."""
    details: dict[str, object] = {}
    if transfers.send is not None:
        details |= {"to": transfers.send.peer, "sent": len(transfers.send.slots)}
    if transfers.receive is not None:
        details |= {"from": transfers.receive.peer, "received": len(transfers.receive.slots)}
    return details


def _message(peer: int, message: Tensor | None) -> PeerBuffer:
    assert message is not None
    return PeerBuffer(peer, message)


def checksum_sum(checksums: Sequence[tuple[str, Tensor]]) -> int:
    """Sums the digests of messages, (name, checksums of its slots), modulo 2**64."""
    return sum(message_checksum(name, checksums) for name, checksums in checksums) & MASK64


def message_checksum(name: str, checksums: Tensor) -> int:
    """Returns a 64-bit digest of a message: of its name and the checksums, int64 [n]."""
    words = checksums.cpu().numpy().astype("<i8").tobytes()
    return int.from_bytes(blake2b(name.encode() + words, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class ReadyChunk:
    """A staged chunk with what its commit needs and what the vote compares.

    Attributes:
        staged: where its weights are.
        layer_update: placement, shares and tables of its layers.
        checksum: its entry on the ballot.
    """

    staged: StagedChunk
    layer_update: LayerUpdate
    checksum: ChunkChecksum

    def trace_fields(self) -> dict[str, object]:
        """Returns its layers, and what this rank received."""
        size = {"copies": len(self.staged.copies), "bytes received": self.staged.bytes_received}
        return {**self.layer_update.trace_fields(), **size}


def stage_chunk(staging: Job[StagedChunk], update: LayerUpdate) -> Job[ReadyChunk]:
    """Stages a chunk, and adds what the ballot says of it."""
    staged = yield from staging
    return ReadyChunk(staged, update, ChunkChecksum(staged.sent, staged.received, update.digest))
