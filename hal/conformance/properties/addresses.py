"""Family *addresses*: slots stay where they are; operations write their bytes and no others.

Also bad arguments, slots as long as real experts, and calls with hundreds of slots: a copy is made
in chunks and a call is packed into lists of limited length, so a case plays many of both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.conformance.context import (
    NEXT,
    Play,
    RankContext,
    catch,
    require,
    require_equal,
    to_host,
)
from equipoise.hal.conformance.fixtures.collectives import dtype_named
from equipoise.hal.conformance.fixtures.slot_store import (
    SLOT_OP_ROLE,
    SLOT_ROLES,
    SegmentSpec,
    SlotStoreFixture,
    TrackedSlotStore,
    make_slot_store,
)
from equipoise.hal.conformance.program import Program, Step, make_program
from equipoise.hal.conformance.properties import readers_and_leases
from equipoise.hal.conformance.properties.kernels_large import random_bytes
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.errors import SlotError, SlotLeased
from equipoise.hal.slots import SlotLayout, SlotStore
from equipoise.hal.stream import Stream

FAMILY = "addresses"
MAX_CALLS = 8
"""Calls of a program."""
SLOTS = 2
STAGING = 2
FLOATS = ("float32", "bfloat16", "float16", "float64")
DTYPES = ("uint8", "int16", *FLOATS)
OFFSETS = 4
"""Elements at most by which a segment is off the alignment."""
PADDINGS = 4
"""Maximum number of elements that a private segment stores after those of its tensor."""
SLOT = st.integers(0, SLOTS - 1)
BUFFER = st.integers(0, STAGING - 1)
_Checksums = tuple[str, Tensor, list[Tensor]]
"""Of what, its checksums, and the contents whose checksums they are to be."""


def _calls() -> st.SearchStrategy[Step]:
    return st.one_of(
        st.builds(lambda s: Step("write", (s,)), SLOT),
        st.builds(lambda b, s: Step("commit", (b, s)), BUFFER, SLOT),
        st.builds(lambda s: Step("pack", (s,)), SLOT),
    )


def _parts(dtypes: Sequence[str], offsets: int) -> st.SearchStrategy[Step]:
    return st.builds(
        lambda dtype, elements, offset: Step(
            "part", (dtype, elements, offset * dtype_named(dtype).itemsize)
        ),
        st.sampled_from(dtypes),
        st.integers(1, 5),
        st.integers(0, offsets),
    )


def _with_parts(parts: st.SearchStrategy[Step], most: int) -> st.SearchStrategy[Program]:
    """The segments of a slot first, then calls."""
    return st.builds(
        lambda layout, calls: make_program([*layout, *calls]),
        st.lists(parts, min_size=1, max_size=most),
        st.lists(_calls(), min_size=1, max_size=MAX_CALLS),
    )


def _segment_specs(program: Program) -> list[SegmentSpec]:
    rows = [step.args for step in program.steps if step.op == "part"]
    return [SegmentSpec(dtype_named(dtype), int(count), int(off)) for dtype, count, off in rows]


def _play_calls(tracked: TrackedSlotStore, program: Program) -> Play:
    """Every call, then a pack of every slot that was changed."""
    for number, step in enumerate(program.steps, start=1):
        if step.op != "part":
            tracked.run_step(number, step)
            yield NEXT
    for slot in tracked.expected_slots:
        tracked.pack(f"slot {slot} as packed in the end", slot)
    tracked.fixture.ctx.drain()


# ----- A1, A4, A6: a slot is its segments ---------------------------------------------------------


def _segments(_: Traits) -> st.SearchStrategy[Program]:
    return _with_parts(_parts(DTYPES, OFFSETS), 3)


def _play_segments(ctx: RankContext, program: Program) -> Play:
    tracked = TrackedSlotStore(make_slot_store(ctx, SLOTS, STAGING, _segment_specs(program)))
    before = _addresses(tracked.fixture.layout)
    yield from _play_calls(tracked, program)
    after = _addresses(tracked.fixture.store.layout)
    require("A1", after == before, f"slots are at {after}, not as they were at {before}")
    require(
        "A4",
        tracked.fixture.guards_intact(),
        "a byte beside a segment, or beside a blob, was written",
    )
    for what, blob, expected in (*tracked.packs, *tracked.blobs):
        require_equal("A6", blob, expected, what)
    for slot, expected in tracked.expected_slots.items():
        require_equal(
            "A1",
            tracked.fixture.read_slot(slot),
            expected,
            f"slot {slot} through the layout's own tensors",
        )


def _addresses(layout: SlotLayout) -> list[object]:
    tensors = [segment.data for slot in layout.slots for segment in slot]
    return [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]


# ----- A7, A10: bytes survive ---------------------------------------------------------------------


def _floats(_: Traits) -> st.SearchStrategy[Program]:
    return _with_parts(_parts(FLOATS, 0), 1)


def _play_floats(ctx: RankContext, program: Program) -> Play:
    parts = _segment_specs(program)
    tracked = TrackedSlotStore(
        make_slot_store(ctx, SLOTS, STAGING, parts), float_bytes=parts[0].dtype.itemsize
    )
    yield from _play_calls(tracked, program)
    for what, blob, expected in tracked.packs:
        require_equal("A7", blob, expected, f"{parts[0].dtype}, {what}")
    count = tracked.fixture.store.conversions
    require("A7", count == 0, f"{count} conversions between slots of equal strided descriptors")


def _private(_: Traits) -> st.SearchStrategy[Program]:
    """The last number of a part is its padding."""
    return _with_parts(_parts(FLOATS, PADDINGS), 2)


def _private_format_support(traits: Traits) -> str | None:
    declared = SlotFormat.PRIVATE in traits.accelerator.slot_formats
    return None if declared else "slot_formats"


def _play_private(ctx: RankContext, program: Program) -> Play:
    """What fills a slot, or is read from it, is its whole storage."""
    parts = [
        SegmentSpec(part.dtype, part.elements, format=SlotFormat.PRIVATE, padding=part.offset)
        for part in _segment_specs(program)
    ]
    tracked = TrackedSlotStore(make_slot_store(ctx, SLOTS, STAGING, parts))
    yield from _play_calls(tracked, program)
    sums = _issue_checksums(tracked)
    ctx.drain()
    for what, blob, expected in tracked.packs:
        require_equal("A10", blob, expected, f"in a private format, padding included, {what}")
    for slot, expected in tracked.expected_slots.items():
        require_equal(
            "A10",
            tracked.fixture.read_slot(slot),
            expected,
            f"slot {slot}, the storage of its segments",
        )
    _require_checksums("A10", sums)


# ----- A5: any mapping of slots to slots ----------------------------------------------------------

MAPPED_SLOTS = 4
"""Slots of a mapping."""


def _mappings(_: Traits) -> st.SearchStrategy[Program]:
    digits = st.lists(
        st.integers(0, MAPPED_SLOTS - 1), min_size=MAPPED_SLOTS, max_size=MAPPED_SLOTS
    )
    mapping = digits.map(lambda sources: "".join(map(str, sources)))
    kinds = st.sampled_from(("each", "shared"))
    step = st.builds(lambda kind, sources: Step(kind, (sources,)), kinds, mapping)
    return st.lists(step, min_size=1, max_size=3).map(make_program)


def _play_mappings(ctx: RankContext, program: Program) -> Play:
    """Step *each* brings every slot through a staging buffer of its own; in *shared*, slots with
    one source share a buffer. Digit k of the mapping is the slot that slot k is copied from."""
    fixture = make_slot_store(
        ctx,
        MAPPED_SLOTS,
        MAPPED_SLOTS,
        [SegmentSpec(torch.uint8, 3), SegmentSpec(torch.int16, 2)],
    )
    for slot in range(MAPPED_SLOTS):
        fixture.write([slot], slot + 1, SLOT_OP_ROLE)
    expected = list(range(1, MAPPED_SLOTS + 1))
    for step in program.steps:
        sources = [int(digit) for digit in str(step.args[0])]
        _remap(fixture, step.op, sources)
        expected = [expected[source] for source in sources]
        yield NEXT
    blob = fixture.pack(range(MAPPED_SLOTS), SLOT_OP_ROLE)
    ctx.drain()
    versions_by_slot = [sorted(set(row)) for row in blob.view(MAPPED_SLOTS, -1).tolist()]
    expected_rows = [[version] for version in expected]
    require(
        "A5",
        versions_by_slot == expected_rows,
        f"slots hold what came from {versions_by_slot}, not from {expected_rows}",
    )


def _remap(fixture: SlotStoreFixture, kind: str, sources: list[int]) -> None:
    packed = sources if kind == "each" else sorted(set(sources))
    blob = fixture.pack(packed, SLOT_OP_ROLE)
    fixture.keepalive.append(blob)
    fixture.store.unpack(blob, range(len(packed)), fixture.stream(SLOT_OP_ROLE))
    buffers = (
        range(MAPPED_SLOTS) if kind == "each" else [packed.index(source) for source in sources]
    )
    fixture.store.commit(
        list(zip(buffers, range(MAPPED_SLOTS), strict=True)), fixture.stream(SLOT_OP_ROLE)
    )


# ----- D4: one checksum everywhere ----------------------------------------------------------------


def _checksum_programs(_: Traits) -> st.SearchStrategy[Program]:
    return _with_parts(_parts(("uint8", "float32"), 0), 3)


def _play_checksums(ctx: RankContext, program: Program) -> Play:
    """Behind each call, the checksums of everything that holds something."""
    tracked = TrackedSlotStore(make_slot_store(ctx, SLOTS, STAGING, _segment_specs(program)))
    checksums: list[_Checksums] = []
    for number, step in enumerate(program.steps, start=1):
        if step.op == "part":
            continue
        tracked.run_step(number, step)
        checksums += [
            (f"step {number}: {what}", out, expected)
            for what, out, expected in _issue_checksums(tracked)
        ]
        yield NEXT
    ctx.drain()
    _require_checksums("D4", checksums)


def _issue_checksums(tracked: TrackedSlotStore) -> list[_Checksums]:
    store, checksums = tracked.fixture.store, []
    for what, contents, operation in (
        ("slots", tracked.expected_slots, store.checksum_slots),
        ("staging", tracked.expected_staging, store.checksum_staging),
    ):
        if contents:
            numbers = sorted(contents)
            out = tracked.fixture.ctx.empty((len(numbers),), torch.int64)
            operation(numbers, out, tracked.fixture.stream(SLOT_OP_ROLE))
            checksums.append((f"{what} {numbers}", out, [contents[number] for number in numbers]))
    return checksums


def _require_checksums(clause: str, checksums: Sequence[_Checksums]) -> None:
    for what, out, contents in checksums:
        expected = [as_int64(checksum(content)) for content in contents]
        require(
            clause,
            out.tolist() == expected,
            f"checksums of {what} are {out.tolist()}, not {expected}",
        )


CONTENTS = (
    Property(
        name="operations-move-every-byte-of-the-segments",
        family=FAMILY,
        clauses=("A6", "A1", "A4"),
        claim="Operations move the bytes of every segment, at any offset, in place, and no others.",
        programs=_segments,
        play=_play_segments,
    ),
    Property(
        name="floats-that-arithmetic-would-change-survive",
        family=FAMILY,
        clauses=("A7",),
        claim="Not-a-number, minus zero and denormals are copied as bytes.",
        programs=_floats,
        play=_play_floats,
    ),
    Property(
        name="private-formats-travel-whole",
        family=FAMILY,
        clauses=("A10",),
        claim="Segments of a private format are copied, and summed, with all that they store.",
        programs=_private,
        play=_play_private,
        needs=_private_format_support,
    ),
    Property(
        name="any-slot-mapping-is-committed-correctly",
        family=FAMILY,
        clauses=("A5",),
        claim="Duplicates, self-moves, cycles and one source for many slots end as proposed.",
        programs=_mappings,
        play=_play_mappings,
    ),
    Property(
        name="checksums-are-those-of-the-definition",
        family=FAMILY,
        clauses=("D4",),
        claim="Checksums of slots and staging are the defined function of their bytes.",
        programs=_checksum_programs,
        play=_play_checksums,
    ),
)


SEGMENT_BYTES = (4097, 65_535, 65_536, (1 << 20) + 1, (4 << 20) - 1, (4 << 20) + 1)
"""Bytes of a segment: powers of two, a copy's chunk of 4 MiB, and neighbours."""
SECOND_SEGMENT_BYTES = 3
"""Bytes of the following segment."""
STORE_SIZES = ((300, 70),)
"""Slots and staging buffers of a store."""
SMALL_SLOT_BYTES = 5
"""Bytes of each of many slots."""


def _long(_: Traits) -> st.SearchStrategy[Program]:
    """`long(bytes, key)` of every length; `key` draws the contents."""
    return st.integers(0, 255).map(
        lambda key: make_program([Step("long", (length, key)) for length in SEGMENT_BYTES])
    )


def _play_long(ctx: RankContext, program: Program) -> Play:
    """Every operation once, each with contents of its own, then every byte is compared."""
    for step in program.steps:
        length, key = (int(number) for number in step.args)
        fixture = make_slot_store(
            ctx,
            2,
            1,
            [SegmentSpec(torch.uint8, length), SegmentSpec(torch.uint8, SECOND_SEGMENT_BYTES)],
        )
        first_slot, second_slot = (
            random_bytes(length + SECOND_SEGMENT_BYTES, key + k) for k in (0, 1)
        )
        sums = ctx.empty((2,), torch.int64), ctx.empty((1,), torch.int64)
        stream = fixture.stream(SLOT_OP_ROLE)
        fixture.store.write([0], [fixture.make_source(first_slot)], stream)
        blob = ctx.copy_of(second_slot)
        fixture.keepalive.append(blob)
        fixture.store.unpack(blob, [0], stream)
        fixture.store.commit([(0, 1)], stream)
        packed = fixture.pack([0, 1], SLOT_OP_ROLE)
        fixture.store.checksum_slots([0, 1], sums[0], stream)
        fixture.store.checksum_staging([0], sums[1], stream)
        yield NEXT
        ctx.drain(stream)
        for slot, expected in ((0, first_slot), (1, second_slot)):
            require_equal(
                "A6",
                fixture.read_slot(slot),
                expected,
                f"slot {slot} of {length} + {SECOND_SEGMENT_BYTES} bytes",
            )
        require_equal(
            "A6",
            packed,
            torch.cat([first_slot, second_slot]),
            f"a pack of {length} + {SECOND_SEGMENT_BYTES} bytes",
        )
        require("A4", fixture.guards_intact(), f"a byte beside a segment of {length} was written")
        for name, out, parts in (
            ("slots", sums[0], (first_slot, second_slot)),
            ("staging", sums[1], (second_slot,)),
        ):
            expected_sums = [as_int64(checksum(part)) for part in parts]
            require(
                "D4",
                to_host(out).tolist() == expected_sums,
                f"checksums of {name} of {length} bytes",
            )


def _many(_: Traits) -> st.SearchStrategy[Program]:
    """`many(slots, staging, key)`; `key` draws contents, and which slot takes which buffer."""
    return st.integers(0, 255).map(
        lambda key: make_program([Step("many", (*counts, key)) for counts in STORE_SIZES])
    )


def _play_many(ctx: RankContext, program: Program) -> Play:
    """Each operation is one call for all of its slots."""
    for step in program.steps:
        slots, staging, key = (int(number) for number in step.args)
        fixture = make_slot_store(ctx, slots, staging, [SegmentSpec(torch.uint8, SMALL_SLOT_BYTES)])
        contents = random_bytes(slots * SMALL_SLOT_BYTES, key).view(slots, SMALL_SLOT_BYTES)
        staged_rows = random_bytes(staging * SMALL_SLOT_BYTES, key + 1).view(
            staging, SMALL_SLOT_BYTES
        )
        generator = torch.Generator().manual_seed(key)
        targets = torch.randperm(slots, generator=generator)[:staging].tolist()
        stream, store = fixture.stream(SLOT_OP_ROLE), fixture.store
        store.write(range(slots), [fixture.make_source(row) for row in contents], stream)
        blob = ctx.copy_of(staged_rows.reshape(-1))
        fixture.keepalive.append(blob)
        store.unpack(blob, range(staging), stream)
        store.commit(list(zip(range(staging), targets, strict=True)), stream)
        expected = contents.clone()
        expected[targets] = staged_rows
        packed = fixture.pack(range(slots), SLOT_OP_ROLE)
        sums = ctx.empty((slots,), torch.int64)
        store.checksum_slots(range(slots), sums, stream)
        yield NEXT
        ctx.drain(stream)
        _require_slots(fixture, packed, expected)
        expected_sums = [as_int64(checksum(row)) for row in expected]
        wrong = [k for k, total in enumerate(to_host(sums).tolist()) if total != expected_sums[k]]
        require("D4", not wrong, f"checksums of slots {wrong[:5]} of {slots}")


def _require_slots(fixture: SlotStoreFixture, packed: Tensor, expected: Tensor) -> None:
    for slot, row in enumerate(expected):
        require_equal("A8", fixture.read_slot(slot), row, f"slot {slot} of {len(expected)}")
    require_equal("A8", packed, expected.reshape(-1), f"a pack of {len(expected)} slots")
    require("A4", fixture.guards_intact(), "a byte beside a segment was written")


LARGE_SLOTS = (
    Property(
        name="slots-of-any-length-are-copied-whole",
        family=FAMILY,
        clauses=("A6", "A4", "D4"),
        claim="Operations move every byte of segments up to megabytes, also at chunk borders.",
        programs=_long,
        play=_play_long,
        large=True,
    ),
    Property(
        name="an-operation-takes-hundreds-of-slots",
        family=FAMILY,
        clauses=("A8", "A4", "D4"),
        claim="One call of an operation does for hundreds of slots what it does for one.",
        programs=_many,
        play=_play_many,
        large=True,
    ),
)


SLOT_COUNT = 2
"""Slots, and staging buffers."""
BAD_CALL_SEGMENTS = [SegmentSpec(torch.uint8, 4), SegmentSpec(torch.int16, 2)]
SIZE = 8
"""Bytes of a slot."""
UNTOUCHED_BYTE = 0x77
"""What outputs hold before, and must hold after."""
CALL_ROLE = SLOT_ROLES[1]


@dataclass
class _BadCallRunner:
    """A store with known contents, and outputs that no bad call may touch."""

    fixture: SlotStoreFixture
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def store(self) -> SlotStore:
        return self.fixture.store

    @property
    def stream(self) -> Stream:
        return self.fixture.stream(CALL_ROLE)

    def output(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """An output of that many elements."""
        data = self.fixture.ctx.full((count * dtype.itemsize,), UNTOUCHED_BYTE)
        self.outputs.append(data)
        return data.view(dtype)

    def source(self, *dtypes: torch.dtype, shape: tuple[int, ...] = (4,)) -> list[Tensor]:
        """Segments that do not fit, unless the dtypes are those of `BAD_CALL_SEGMENTS`."""
        first, *other_dtypes = dtypes
        segments = [self.fixture.ctx.full(shape, 1, first)]
        return segments + [self.fixture.ctx.full((2,), 1, dtype) for dtype in other_dtypes]

    @property
    def fitting_source(self) -> list[Tensor]:
        return self.source(torch.uint8, torch.int16)


def _with_gaps(tensor: Tensor) -> Tensor:
    return tensor[::2]


BAD_PACKS: Mapping[str, Callable[[_BadCallRunner], object]] = {
    "pack_unknown_slot": lambda d: d.store.pack([0, SLOT_COUNT], d.output(2 * SIZE), d.stream),
    "pack_negative_slot": lambda d: d.store.pack([0, -1], d.output(2 * SIZE), d.stream),
    "pack_into_too_little": lambda d: d.store.pack([0, 1], d.output(2 * SIZE - 1), d.stream),
    "pack_into_too_much": lambda d: d.store.pack([0], d.output(2 * SIZE), d.stream),
    "pack_into_other_type": lambda d: d.store.pack([0], d.output(SIZE, torch.int8), d.stream),
    "pack_into_strides": lambda d: d.store.pack([0], _with_gaps(d.output(2 * SIZE)), d.stream),
    "unpack_to_unknown": lambda d: d.store.unpack(d.output(2 * SIZE), [0, SLOT_COUNT], d.stream),
    "unpack_to_negative": lambda d: d.store.unpack(d.output(2 * SIZE), [0, -1], d.stream),
    "unpack_too_little": lambda d: d.store.unpack(d.output(2 * SIZE - 1), [0, 1], d.stream),
    "unpack_too_much": lambda d: d.store.unpack(d.output(2 * SIZE), [0], d.stream),
}
BAD_COMMITS: Mapping[str, Callable[[_BadCallRunner], object]] = {
    "commit_to_unknown": lambda d: d.store.commit([(0, 0), (1, SLOT_COUNT)], d.stream),
    "commit_to_negative": lambda d: d.store.commit([(0, 0), (1, -1)], d.stream),
    "commit_of_unknown": lambda d: d.store.commit([(0, 0), (SLOT_COUNT, 1)], d.stream),
    "commit_of_negative": lambda d: d.store.commit([(0, 0), (-1, 1)], d.stream),
}
BAD_WRITES: Mapping[str, Callable[[_BadCallRunner], object]] = {
    "write_to_unknown": lambda d: d.store.write(
        [0, SLOT_COUNT], [d.fitting_source, d.fitting_source], d.stream
    ),
    "write_to_negative": lambda d: d.store.write(
        [0, -1], [d.fitting_source, d.fitting_source], d.stream
    ),
    "write_of_too_few": lambda d: d.store.write([0, 1], [d.fitting_source], d.stream),
    "write_of_other_type": lambda d: d.store.write(
        [0, 1], [d.fitting_source, d.source(torch.int8, torch.int16)], d.stream
    ),
    "write_of_other_shape": lambda d: d.store.write(
        [0, 1], [d.fitting_source, d.source(torch.uint8, torch.int16, shape=(2, 2))], d.stream
    ),
    "write_without_segment": lambda d: d.store.write(
        [0, 1], [d.fitting_source, d.source(torch.uint8)], d.stream
    ),
    "write_of_strides": lambda d: d.store.write(
        [0, 1],
        [d.fitting_source, [_with_gaps(d.fixture.ctx.full((8,), 1)), d.fitting_source[1]]],
        d.stream,
    ),
}
BAD_CHECKSUMS: Mapping[str, Callable[[_BadCallRunner], object]] = {
    "sum_of_unknown_slot": lambda d: d.store.checksum_slots(
        [0, SLOT_COUNT], d.output(2, torch.int64), d.stream
    ),
    "sum_into_other_type": lambda d: d.store.checksum_slots(
        [0], d.output(1, torch.int32), d.stream
    ),
    "sum_into_too_much": lambda d: d.store.checksum_slots([0], d.output(2, torch.int64), d.stream),
    "sum_of_unknown_staging": lambda d: d.store.checksum_staging(
        [0, SLOT_COUNT], d.output(2, torch.int64), d.stream
    ),
    "staging_sum_into_too_much": lambda d: d.store.checksum_staging(
        [0], d.output(2, torch.int64), d.stream
    ),
}
BAD_LEASES: Mapping[str, Callable[[_BadCallRunner], object]] = {
    "lease_of_unknown": lambda d: d.store.lease([0, SLOT_COUNT]),
    "lease_of_negative": lambda d: d.store.lease([0, -1]),
}
BAD_CALLS = {**BAD_PACKS, **BAD_COMMITS, **BAD_WRITES, **BAD_CHECKSUMS, **BAD_LEASES}
"""One bad argument each; where a call takes many, the second is bad."""


def _bad_call_programs(_: Traits) -> st.SearchStrategy[Program]:
    steps = st.sampled_from(sorted(BAD_CALLS)).map(Step)
    return st.lists(steps, min_size=1, max_size=4).map(make_program)


def _play_bad_calls(ctx: RankContext, program: Program) -> Play:
    runner = _BadCallRunner(make_slot_store(ctx, SLOT_COUNT, SLOT_COUNT, BAD_CALL_SEGMENTS))
    for number in range(SLOT_COUNT):
        runner.fixture.write([number], number + 1, CALL_ROLE)
        runner.fixture.unpack([number], SLOT_COUNT + number + 1, CALL_ROLE)
    for step in program.steps:
        refusal = catch(partial(BAD_CALLS[step.op], runner), Exception)
        description = f"{type(refusal).__name__}: {refusal}" if refusal else "nothing"
        require(
            "A8", isinstance(refusal, SlotError), f"{step} raised {description}, not a SlotError"
        )
        yield NEXT
    slot_blob = runner.fixture.pack(range(SLOT_COUNT), CALL_ROLE)
    leased = catch(partial(_commit_all, runner), SlotLeased)
    require("A8", not leased, f"a refused lease holds slots: {leased}")
    staging_blob = runner.fixture.pack(range(SLOT_COUNT), CALL_ROLE)
    ctx.drain()
    for what, blob, expected in (("slots", slot_blob, (1, 2)), ("staging", staging_blob, (3, 4))):
        rows = [sorted(set(row)) for row in blob.view(SLOT_COUNT, SIZE).tolist()]
        require("A8", rows == [[v] for v in expected], f"a refused call changed {what}: {rows}")
    touched = any(bool((to_host(output) != UNTOUCHED_BYTE).any()) for output in runner.outputs)
    require("A8", not touched, "a refused call wrote to its output")


def _commit_all(runner: _BadCallRunner) -> None:
    runner.store.commit([(number, number) for number in range(SLOT_COUNT)], runner.stream)


BAD_ARGUMENTS = (
    Property(
        name="a-bad-argument-changes-nothing",
        family="addresses",
        clauses=("A8",),
        claim="A slot operation with one bad argument raises SlotError, and nothing else happens.",
        programs=_bad_call_programs,
        play=_play_bad_calls,
    ),
)


PROPERTIES: tuple[Property, ...] = (
    *CONTENTS,
    *BAD_ARGUMENTS,
    *readers_and_leases.LEASES,
    *readers_and_leases.READERS,
    *readers_and_leases.PAGES,
    *LARGE_SLOTS,
)
