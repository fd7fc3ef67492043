"""Mutants of family *addresses*: arguments, leases, readers and pages."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import device_with
from torch import Tensor

from equipoise.backends.virtual.accelerator import VirtualPagePool
from equipoise.backends.virtual.arena import Bytes
from equipoise.backends.virtual.slots import VirtualSlotStore
from equipoise.hal.stream import Event, Stream
from equipoise.hal.support.page_pool import PoolPage
from equipoise.hal.support.slot_access import AttachedReader, LeaseTable, ReaderRegistry, SlotLease


class PairByPairStore(VirtualSlotStore):
    """A commit looks at each pair when its turn has come."""

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        with self._leases.exclude_leased([slot for _, slot in copies]):
            for pair in copies:
                super().commit([pair], stream)


class WrappingStore(VirtualSlotStore):
    """Numbers below zero count from the end."""

    def _valid_numbers(self, numbers: Sequence[int], limit: int, what: str) -> tuple[int, ...]:
        return super()._valid_numbers(
            [n + limit if -limit <= n < 0 else n for n in numbers], limit, what
        )


class GenerousStore(VirtualSlotStore):
    """A blob may be larger than what goes into it."""

    def _rows(self, blob: Tensor, count: int) -> list[Bytes]:
        return super()._rows(blob[: count * self._layout.slot_bytes], count)


class HastyLeases(VirtualSlotStore):
    """The slots before a bad one are leased although the call is refused."""

    def lease(self, slots: Sequence[int]) -> SlotLease:
        lease = self._leases.acquire(slots)
        self._valid_numbers(slots, len(self._slots), "slot")
        return lease


class FirstSlotLeases(LeaseTable):
    """Only the first slot of a batch is looked at."""

    @contextmanager
    def exclude_leased(self, slots: Iterable[int]) -> Iterator[None]:
        with super().exclude_leased(list(slots)[:1]):
            yield


class RecountedLeases(LeaseTable):
    """A lease that is released twice releases another lease too."""

    def release(self, lease: SlotLease) -> None:
        lease.ended = False
        super().release(lease)


class FlatLeases(LeaseTable):
    """A slot is leased or not: the first release frees it."""

    def acquire(self, slots: Iterable[int]) -> SlotLease:
        lease = super().acquire(slots)
        self._counts.update(dict.fromkeys(lease.slots, 0))
        for slot in lease.slots:
            self._counts[slot] = 1
        return lease


class HastyWriters(ReaderRegistry):
    """A commit does not wait for what readers have launched."""

    def wait_for_readers(self, writer: Stream) -> tuple[Stream, ...]:
        streams = dict.fromkeys(reader.stream for reader in self._attached)
        return tuple(stream for stream in streams if stream is not writer)


class HastyReaders(ReaderRegistry):
    """What readers launch later does not wait for the commit."""

    def resume_readers(self, held: Iterable[Stream], done: Event) -> None:
        return None


class FirstReaderOnly(ReaderRegistry):
    """One reader is respected: that which was attached first."""

    def attach(self, stream: Stream) -> AttachedReader:
        if self._attached:
            return AttachedReader(self, stream)
        return super().attach(stream)


class ForgettingReaders(ReaderRegistry):
    """What a reader had launched is forgotten when it is detached."""

    def detach(self, reader: AttachedReader) -> None:
        super().detach(reader)
        self._detached_events.clear()


class StreamwiseReaders(ReaderRegistry):
    """Detaching one of a stream's readers detaches the stream."""

    def detach(self, reader: AttachedReader) -> None:
        for other in [r for r in self._attached if r.stream is reader.stream]:
            super().detach(other)


class HastyPool(VirtualPagePool):
    """A page is free as soon as it is given back."""

    def put(self, page: PoolPage, after: Event | None) -> None:
        super().put(page, None)


class ForgivingPool(VirtualPagePool):
    """A page may be given back twice, and is then handed out twice."""

    def put(self, page: PoolPage, after: Event | None) -> None:
        page.returned = False
        super().put(page, after)


ARGUMENTS = "a-bad-argument-changes-nothing"
LEASES = "writes-to-a-leased-slot-are-refused"
READERS = "attached-readers-and-commits-keep-the-order-of-issue"
PAGES = "a-page-is-not-handed-out-under-a-copy"
MACHINE = "accelerator-state-machine-matches-its-model"
VAIN = "a-wait-raises-at-its-timeout"
# A slot of several bytes that is read while it is written is torn, a batch is seen in parts; and
# the machine has readers, too.
WHOLE_READS = ("a-slot-is-read-whole", "a-batch-is-seen-whole", MACHINE)
MUTANTS = (
    Mutant(
        name="a-commit-is-checked-pair-by-pair",
        clause="A8",
        broken="What stands before a bad pair is committed.",
        property=ARGUMENTS,
        subject=device_with(slots=PairByPairStore),
    ),
    Mutant(
        name="negative-numbers-count-from-the-end",
        clause="A8",
        broken="Slot -1 is the last slot instead of an error.",
        property=ARGUMENTS,
        subject=device_with(slots=WrappingStore),
    ),
    Mutant(
        name="a-blob-may-be-too-large",
        clause="A8",
        broken="What does not fit a blob's size is taken from its beginning.",
        property=ARGUMENTS,
        subject=device_with(slots=GenerousStore),
    ),
    Mutant(
        name="a-refused-lease-is-taken",
        clause="A8",
        broken="A lease of a slot that there is not raises, and holds the others for ever.",
        property=ARGUMENTS,
        subject=device_with(slots=HastyLeases),
    ),
    Mutant(
        name="only-the-first-slot-of-a-batch-is-looked-at",
        clause="A11",
        broken="A leased slot is committed over, if it is not the first of its batch.",
        property=LEASES,
        subject=device_with(leases=FirstSlotLeases),
    ),
    Mutant(
        name="a-lease-gives-back-more-than-it-took",
        clause="A11",
        broken="The second release of a lease ends another lease of the slot.",
        property=LEASES,
        # The machine leases and releases, too.
        also=(MACHINE,),
        subject=device_with(leases=RecountedLeases),
    ),
    Mutant(
        name="leases-of-a-slot-do-not-add-up",
        clause="A11",
        broken="The first release of two frees the slot while the other peer still reads.",
        property=LEASES,
        # The machine leases and releases, too.
        also=(MACHINE,),
        subject=device_with(leases=FlatLeases),
    ),
    Mutant(
        name="a-commit-does-not-wait-for-readers",
        clause="A12",
        broken="A slot is written while a launched forward reads it.",
        property=READERS,
        also=WHOLE_READS,
        subject=device_with(readers=HastyWriters),
    ),
    Mutant(
        name="readers-do-not-wait-for-a-commit",
        clause="A12",
        broken="What is launched behind a commit reads what was there before.",
        property=READERS,
        also=WHOLE_READS,
        subject=device_with(readers=HastyReaders),
    ),
    Mutant(
        name="one-reader-is-respected",
        clause="A12",
        broken="Of several streams that read, the first attached is waited for: no draft model.",
        property=READERS,
        also=WHOLE_READS,
        subject=device_with(readers=FirstReaderOnly),
    ),
    Mutant(
        name="a-detached-reader-is-forgotten-at-once",
        clause="A12",
        broken="What a stream had launched before it was detached is not waited for.",
        property=READERS,
        subject=device_with(readers=ForgettingReaders),
    ),
    Mutant(
        name="detaching-one-reader-detaches-its-stream",
        clause="A12",
        broken="A stream with two readers is forgotten with the first of them.",
        property=READERS,
        # The machine attaches streams twice, too.
        also=(MACHINE,),
        subject=device_with(readers=StreamwiseReaders),
    ),
    Mutant(
        name="a-page-is-free-when-it-is-given-back",
        clause="A13",
        broken="A page is handed out while a copy still reads it (TensorRT-LLM's host pool).",
        property=PAGES,
        # The machine writes slots from pages, too; and a pool is waited for in vain while its page
        # is still read.
        also=(MACHINE, VAIN),
        subject=device_with(pool=HastyPool),
    ),
    Mutant(
        name="a-page-can-be-given-back-twice",
        clause="A13",
        broken="Two takers get the same page.",
        property=PAGES,
        subject=device_with(pool=ForgivingPool),
    ),
)
