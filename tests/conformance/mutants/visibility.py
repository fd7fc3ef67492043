"""Mutants of family *visibility*."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import device_with

from equipoise.backends.virtual.slots import Buffer, VirtualSlotStore
from equipoise.backends.virtual.stream import VirtualStream, VirtualStreamOp, own_stream
from equipoise.hal.stream import Event, Role, Stream
from equipoise.hal.support.slot_access import HazardTracker, SlotLease

PIECES = 2
"""In how many pieces the virtual store copies a segment."""
Steps = Callable[[], Iterator[None]]


class _ForgetsReadsOf(HazardTracker):
    """A write does not wait for reads of buffers of one kind."""

    kind = ""

    def _note(
        self,
        stream: Stream,
        reads: tuple[Hashable, ...],
        writes: tuple[Hashable, ...],
        done: Event,
    ) -> None:
        noted_reads = tuple(b for b in reads if not (isinstance(b, tuple) and b[0] == self.kind))
        super()._note(stream, noted_reads, writes, done)


class SourceIsOverwritten(_ForgetsReadsOf):
    """A commit does not wait until the slot was packed."""

    kind = "slot"


class StagingIsReused(_ForgetsReadsOf):
    """Unpacking does not wait for the commit that reads the staging buffer."""

    kind = "staging"


class ReadsBeforeArrival(HazardTracker):
    """A read does not wait for the call that writes."""

    def _conflicting(
        self, stream: Stream, reads: tuple[Hashable, ...], writes: tuple[Hashable, ...]
    ) -> list[Event]:
        return super()._conflicting(stream, (), writes)


class OwnStreamStore(VirtualSlotStore):
    """Changes run on a stream of the store's own, which orders its operations and its readers, but
    not what the caller records on the stream that it gave."""

    def _issue_write(
        self,
        steps: Steps,
        stream: Stream,
        slots: tuple[int, ...],
        reads: Iterable[Buffer] = (),
    ) -> None:
        super()._issue_write(steps, self._device.stream(Role.AUX), slots, reads)


class EarlyStore(VirtualSlotStore):
    """Lets readers continue before a change has ended."""

    def _issue_write(
        self,
        steps: Steps,
        stream: Stream,
        slots: tuple[int, ...],
        reads: Iterable[Buffer] = (),
    ) -> None:
        def issue(on: VirtualStream) -> None:
            with self._hazards.track(on, reads=reads, writes=tuple(("slot", s) for s in slots)):
                paused_readers, pieces, early = (
                    self._readers.wait_for_readers(on),
                    steps(),
                    self._device.event(),
                )
                on.perform(lambda: islice(pieces, self._held_for(slots)))
                on.record(early)
                on.perform(lambda: pieces)
            self._readers.resume_readers(paused_readers, early)

        own_stream(stream).issue(VirtualStreamOp(issue, lambda: self._leases.exclude_leased(slots)))

    def _held_for(self, slots: tuple[int, ...]) -> int:
        """How many pieces readers wait for."""
        raise NotImplementedError

    def _pieces_of(self, slots: tuple[int, ...]) -> int:
        return PIECES * len(self._layout.descriptor) * len(slots)


class TornStore(EarlyStore):
    """Readers continue before the last piece was copied."""

    def _held_for(self, slots: tuple[int, ...]) -> int:
        return self._pieces_of(slots) - 1


class SlotBySlotStore(EarlyStore):
    """Readers continue when the first slot of a batch was copied."""

    def _held_for(self, slots: tuple[int, ...]) -> int:
        return self._pieces_of(slots[:1])


class ForgetfulLeaseStore(VirtualSlotStore):
    """A leased slot is not written, so the store forgets pending work on its slots."""

    def lease(self, slots: Sequence[int]) -> SlotLease:
        self._hazards._traces.clear()
        return super().lease(slots)


ORDER = "operations-of-a-store-take-effect-in-the-order-of-issue"
MACHINE = "accelerator-state-machine-matches-its-model"
WEIGHTS = "tables-and-weights-of-a-layer-change-together"
MUTANTS = (
    Mutant(
        name="a-source-is-overwritten-while-it-is-packed",
        clause="V5",
        broken="A commit does not wait for the pack that still reads the slot (vLLM #32881).",
        property=ORDER,
        # The machine packs and commits, too.
        also=(MACHINE,),
        subject=device_with(hazards=SourceIsOverwritten),
    ),
    Mutant(
        name="a-slot-is-packed-before-its-commit",
        clause="V5",
        broken="An operation does not wait for one on another stream that brings what it reads.",
        property=ORDER,
        # The machine packs and commits, too.
        also=(MACHINE,),
        subject=device_with(hazards=ReadsBeforeArrival),
    ),
    Mutant(
        name="staging-is-free-once-the-commit-was-issued",
        clause="A2",
        broken="Staging is unpacked into while the commit still reads it (vLLM #32881).",
        property="staging-is-not-rewritten-under-a-commit",
        # New weights of one layer after the other go through few staging buffers.
        also=(MACHINE, WEIGHTS),
        subject=device_with(hazards=StagingIsReused),
    ),
    Mutant(
        name="the-callers-event-says-nothing-of-a-commit",
        clause="V1",
        broken="A commit runs beside the stream it was issued on, whose events do not cover it.",
        property="a-commit-is-visible-after-its-event",
        # Everything that is ordered after a commit or a write is so by an event or a signal.
        also=(
            "the-lock-alternates-writer-and-reader",
            "a-page-is-not-handed-out-under-a-copy",
            "slot-operations-own-their-buffers",
            WEIGHTS,
            MACHINE,
        ),
        subject=device_with(slots=OwnStreamStore),
    ),
    Mutant(
        name="readers-go-on-before-the-last-piece",
        clause="V2",
        broken="A reader is let in while the last piece of its slot is being copied.",
        property="a-slot-is-read-whole",
        # Both have readers, of slots that can be torn.
        also=(WEIGHTS, MACHINE),
        subject=device_with(slots=TornStore),
    ),
    Mutant(
        name="readers-go-on-after-the-first-slot",
        clause="V4",
        broken="A reader is let in when one slot of the batch was committed (vLLM #55228).",
        property="a-batch-is-seen-whole",
        subject=device_with(slots=SlotBySlotStore),
    ),
    Mutant(
        name="a-lease-forgets-who-is-at-work",
        clause="V5",
        broken="Operations that are issued after a lease do not wait for those issued before it.",
        property=MACHINE,
        also=(ORDER,),
        subject=device_with(slots=ForgetfulLeaseStore),
    ),
)
