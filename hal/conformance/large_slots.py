"""Family *addresses*: slots as long as real experts, stores with hundreds of them.

A copy is made in chunks, a call is packed into a list of so many pairs: each case plays every
length and every count below.
"""

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand, equal, told
from equipoise.hal.conformance.large_kernels import random_bytes
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.room import ROLE
from equipoise.hal.conformance.shelf import Part, Shelf, shelf

FAMILY = "addresses"
LENGTHS = (4097, 65_535, 65_536, (1 << 20) + 1, (4 << 20) - 1, (4 << 20) + 1)
"""Bytes of a segment: powers of two, a copy's chunk of 4 MiB, and neighbours."""
BESIDE = 3
"""Bytes of the segment that stands behind it."""
COUNTS = ((300, 70),)
"""Slots and staging buffers of a store."""
WIDTH = 5
"""Bytes of each of many slots."""


def _long(_: Traits) -> st.SearchStrategy[Program]:
    """`long(bytes, key)` of every length; `key` draws the contents."""
    return st.integers(0, 255).map(
        lambda key: program([Step("long", (length, key)) for length in LENGTHS])
    )


def _play_long(bench: Bench, found: Program) -> Play:
    """Every verb once, each with contents of its own, then every byte is compared."""
    for step in found.steps:
        length, key = (int(number) for number in step.args)
        place = shelf(bench, 2, 1, [Part(torch.uint8, length), Part(torch.uint8, BESIDE)])
        written, brought = (random_bytes(length + BESIDE, key + k) for k in (0, 1))
        sums = bench.empty((2,), torch.int64), bench.empty((1,), torch.int64)
        stream = place.stream(ROLE)
        place.store.write([0], [place.source(written)], stream)
        blob = bench.of(brought)
        place.kept.append(blob)
        place.store.unpack(blob, [0], stream)
        place.store.commit([(0, 1)], stream)
        packed = place.pack([0, 1], ROLE)
        place.store.checksum_slots([0, 1], sums[0], stream)
        place.store.checksum_staging([0], sums[1], stream)
        yield NEXT
        bench.drain(stream)
        for slot, due in ((0, written), (1, brought)):
            equal("A6", place.bytes_of(slot), due, f"slot {slot} of {length} + {BESIDE} bytes")
        equal("A6", packed, torch.cat([written, brought]), f"a pack of {length} + {BESIDE} bytes")
        demand("A4", place.intact(), f"a byte beside a segment of {length} was written")
        for name, out, parts in (
            ("slots", sums[0], (written, brought)),
            ("staging", sums[1], (brought,)),
        ):
            wanted = [as_int64(checksum(part)) for part in parts]
            demand("D4", told(out).tolist() == wanted, f"checksums of {name} of {length} bytes")


def _many(_: Traits) -> st.SearchStrategy[Program]:
    """`many(slots, staging, key)`; `key` draws contents, and which slot takes which buffer."""
    return st.integers(0, 255).map(
        lambda key: program([Step("many", (*counts, key)) for counts in COUNTS])
    )


def _play_many(bench: Bench, found: Program) -> Play:
    """Each verb is one call for all of its slots."""
    for step in found.steps:
        slots, staging, key = (int(number) for number in step.args)
        place = shelf(bench, slots, staging, [Part(torch.uint8, WIDTH)])
        written = random_bytes(slots * WIDTH, key).view(slots, WIDTH)
        brought = random_bytes(staging * WIDTH, key + 1).view(staging, WIDTH)
        drawn = torch.Generator().manual_seed(key)
        targets = torch.randperm(slots, generator=drawn)[:staging].tolist()
        stream, store = place.stream(ROLE), place.store
        store.write(range(slots), [place.source(row) for row in written], stream)
        blob = bench.of(brought.reshape(-1))
        place.kept.append(blob)
        store.unpack(blob, range(staging), stream)
        store.commit(list(zip(range(staging), targets, strict=True)), stream)
        due = written.clone()
        due[targets] = brought
        packed = place.pack(range(slots), ROLE)
        sums = bench.empty((slots,), torch.int64)
        store.checksum_slots(range(slots), sums, stream)
        yield NEXT
        bench.drain(stream)
        _judge_many(place, packed, due)
        wanted = [as_int64(checksum(row)) for row in due]
        wrong = [k for k, total in enumerate(told(sums).tolist()) if total != wanted[k]]
        demand("D4", not wrong, f"checksums of slots {wrong[:5]} of {slots}")


def _judge_many(place: Shelf, packed: Tensor, due: Tensor) -> None:
    for slot, row in enumerate(due):
        equal("A8", place.bytes_of(slot), row, f"slot {slot} of {len(due)}")
    equal("A8", packed, due.reshape(-1), f"a pack of {len(due)} slots")
    demand("A4", place.intact(), "a byte beside a segment was written")


PROPERTIES = (
    Property(
        name="slots-of-any-length-are-copied-whole",
        family=FAMILY,
        clauses=("A6", "A4", "D4"),
        claim="Verbs move every byte of segments up to megabytes, at chunk borders and beside.",
        programs=_long,
        play=_play_long,
        large=True,
    ),
    Property(
        name="a-verb-takes-hundreds-of-slots",
        family=FAMILY,
        clauses=("A8", "A4", "D4"),
        claim="One call of a verb does for hundreds of slots what it does for one.",
        programs=_many,
        play=_play_many,
        large=True,
    ),
)
