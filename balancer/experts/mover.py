"""Carries expert weights from the slots that hold them to staging, beside the forward.

Buffers: blobs and checksums are made and used on the copy stream, and belong to one epoch; staging
belongs to it from its first unpack until the commit has run on the compute stream. Source slots are
leased by the protocol: nothing is committed anywhere before every rank has cast `staged`, that is,
has read all it needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from equipoise.balancer.experts.moves import Itinerary, Move
from equipoise.hal.accelerator import Accelerator
from equipoise.hal.communicator import Communicator, Exchange, Parcel
from equipoise.hal.slots import SlotStore
from equipoise.hal.stream import Event, Role, Stream
from equipoise.hal.work import Work


@dataclass(frozen=True)
class Staged:
    """What this rank moved.

    Attributes:
        sent: fingerprint of the slots read for each destination rank.
        received: fingerprint of the staging buffers filled from each source rank.
        copies: (staging, local slot) pairs, to be committed.
        bytes_received: bytes that came from other ranks.
    """

    sent: dict[str, str]
    received: dict[str, str]
    copies: tuple[tuple[int, int], ...]
    bytes_received: int


@dataclass(frozen=True)
class _Voyage:
    """An epoch whose weights travel.

    Attributes:
        moves: its itinerary.
        incoming: what ends here, by the rank that it comes from.
        blobs: where that lands, by the same rank.
        sent: what begins here, as (blob, checksums of the slots), by the rank that it goes to.
        work: the exchange.
    """

    moves: Itinerary
    incoming: dict[int, tuple[Move, ...]]
    blobs: dict[int, Tensor]
    sent: dict[int, tuple[Tensor, Tensor]]
    work: Work


class Mover:
    """Stages epochs for one rank, on the copy stream.

    Args:
        accelerator: whose copy stream and memory are used.
        communicator: used for nothing else.
        store: this rank's slots, numbered layer * slots_per_rank + local slot.
        deadline: seconds that each wait may last.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        store: SlotStore,
        deadline: float,
    ) -> None:
        self._accelerator = accelerator
        self._communicator = communicator
        self._store = store
        self._deadline = deadline

    def begin(self, moves: Itinerary, after: Event) -> Callable[[], Staged]:
        """Begin to stage an epoch; the result ends it, on any thread, and says what was staged.

        Where two communicators do not progress independently, everything that the epoch issues
        is issued here, by the thread that issues everything else (P4); elsewhere nothing is.

        Args:
            moves: the epoch's itinerary, the same on every rank.
            after: recorded on the compute stream behind the last commit.

        Raises, as its result does:
            CommunicatorError, StreamError: the epoch cannot be staged.
        """
        if self._communicator.capabilities.independent_groups:
            return lambda: self._arrive(self._depart(moves, after))
        voyage = self._depart(moves, after)
        return lambda: self._arrive(voyage)

    def _depart(self, moves: Itinerary, after: Event) -> "_Voyage":
        """Read what begins on this rank, and let it travel."""
        copy = self._accelerator.stream(Role.COPY)
        outgoing = self._lanes(lambda peer: moves.between(self._rank, peer))
        incoming = self._lanes(lambda peer: moves.between(peer, self._rank))
        with copy.current():
            copy.wait(after)
            blobs = {peer: self._blob(lane) for peer, lane in incoming.items()}
            sent = self._read(outgoing, blobs, moves, copy)
            return _Voyage(moves, incoming, blobs, sent, self._travel(sent, blobs))

    def _arrive(self, voyage: "_Voyage") -> Staged:
        """Fill staging with what ends on this rank."""
        voyage.work.result(self._deadline)
        copy = self._accelerator.stream(Role.COPY)
        with copy.current():
            return self._unpack(voyage, copy)

    @property
    def _rank(self) -> int:
        return self._communicator.rank

    def _lanes(self, between: Callable[[int], tuple[Move, ...]]) -> dict[int, tuple[Move, ...]]:
        lanes = {peer: between(peer) for peer in range(self._communicator.size)}
        return {peer: lane for peer, lane in lanes.items() if lane}

    def _blob(self, lane: Sequence[Move]) -> Tensor:
        return self._empty(len(lane) * self._store.layout.slot_bytes, torch.uint8)

    def _empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self._accelerator.device)

    def _read(
        self,
        outgoing: dict[int, tuple[Move, ...]],
        blobs: dict[int, Tensor],
        moves: Itinerary,
        copy: Stream,
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Pack each destination's slots; returns (blob, checksums of the slots) by destination."""
        packed: dict[int, tuple[Tensor, Tensor]] = {}
        for peer, lane in outgoing.items():
            slots = [self._local(move.layer, move.source, moves) for move in lane]
            blob = blobs[peer] if peer == self._rank else self._blob(lane)
            marks = self._empty(len(lane), torch.int64)
            self._store.checksum_slots(slots, marks, copy)
            self._store.pack(slots, blob, copy)
            packed[peer] = blob, marks
        if not self._communicator.capabilities.stream_ordered:
            copy.synchronize(self._deadline)
        return packed

    def _travel(self, sent: dict[int, tuple[Tensor, Tensor]], blobs: dict[int, Tensor]) -> Work:
        round = Exchange(
            sends=tuple(Parcel(p, blob) for p, (blob, _) in sent.items() if p != self._rank),
            receives=tuple(Parcel(p, blob) for p, blob in blobs.items() if p != self._rank),
        )
        return self._communicator.exchange(round)

    def _unpack(self, voyage: "_Voyage", copy: Stream) -> Staged:
        marks: dict[int, Tensor] = {}
        copies: list[tuple[int, int]] = []
        for peer, lane in voyage.incoming.items():
            staging = range(len(copies), len(copies) + len(lane))
            copies += [
                (buffer, self._local(move.layer, move.slot, voyage.moves))
                for buffer, move in zip(staging, lane, strict=True)
            ]
            marks[peer] = self._empty(len(lane), torch.int64)
            self._store.unpack(voyage.blobs[peer], staging, copy)
            self._store.checksum_staging(staging, marks[peer], copy)
        copy.synchronize(self._deadline)
        return Staged(
            sent={str(peer): fingerprint(seen) for peer, (_, seen) in voyage.sent.items()},
            received={str(peer): fingerprint(seen) for peer, seen in marks.items()},
            copies=tuple(copies),
            bytes_received=sum(b.numel() for p, b in voyage.blobs.items() if p != self._rank),
        )

    def _local(self, layer: int, slot: int, moves: Itinerary) -> int:
        """Number of a global slot of this rank in the store."""
        return layer * moves.slots_per_rank + slot % moves.slots_per_rank


def fingerprint(checksums: Tensor) -> str:
    """One short word for a list of slot checksums, int64 [n]."""
    words = checksums.cpu().numpy().astype("<i8").tobytes()
    return blake2b(words, digest_size=8).hexdigest()
