"""Properties of family *addresses* about what slots hold: every byte, at its own place."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.checksum import as_int64, checksum
from equipoise.hal.conformance.bench import NEXT, Bench, Play, demand, equal
from equipoise.hal.conformance.collectives import dtype_of
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.room import ROLE, Room
from equipoise.hal.conformance.shelf import Part, Shelf, shelf
from equipoise.hal.slots import SlotLayout

FAMILY = "addresses"
LONGEST = 8
"""Calls of a program."""
SLOTS = 2
STAGING = 2
FLOATS = ("float32", "bfloat16", "float16", "float64")
DTYPES = ("uint8", "int16", *FLOATS)
OFFSETS = 4
"""Elements at most by which a segment is off the alignment."""
PADDINGS = 4
"""Elements at most that a private segment stores behind those that its tensor shows."""
SLOT = st.integers(0, SLOTS - 1)
BUFFER = st.integers(0, STAGING - 1)
_Sums = tuple[str, Tensor, list[Tensor]]
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
            "part", (dtype, elements, offset * dtype_of(dtype).itemsize)
        ),
        st.sampled_from(dtypes),
        st.integers(1, 5),
        st.integers(0, offsets),
    )


def _with_parts(parts: st.SearchStrategy[Step], most: int) -> st.SearchStrategy[Program]:
    """The segments of a slot first, then calls."""
    return st.builds(
        lambda layout, calls: program([*layout, *calls]),
        st.lists(parts, min_size=1, max_size=most),
        st.lists(_calls(), min_size=1, max_size=LONGEST),
    )


def _layout(found: Program) -> list[Part]:
    rows = [step.args for step in found.steps if step.op == "part"]
    return [Part(dtype_of(dtype), int(count), int(off)) for dtype, count, off in rows]


def _play_calls(room: Room, found: Program) -> Play:
    """Every call, then a pack of every slot that was changed."""
    for number, step in enumerate(found.steps, start=1):
        if step.op != "part":
            room.do(number, step)
            yield NEXT
    for slot in room.slots:
        room.pack(f"slot {slot} as packed in the end", slot)
    room.shelf.bench.drain()


# ----- A1, A4, A6: a slot is its segments ---------------------------------------------------------


def _segments(_: Traits) -> st.SearchStrategy[Program]:
    return _with_parts(_parts(DTYPES, OFFSETS), 3)


def _play_segments(bench: Bench, found: Program) -> Play:
    room = Room(shelf(bench, SLOTS, STAGING, _layout(found)))
    before = _addresses(room.shelf.layout)
    yield from _play_calls(room, found)
    after = _addresses(room.shelf.store.layout)
    demand("A1", after == before, f"slots are at {after}, not as they were at {before}")
    demand("A4", room.shelf.intact(), "a byte beside a segment, or beside a blob, was written")
    for what, blob, due in room.packed:
        equal("A6", blob, due, what)
    for slot, due in room.slots.items():
        equal("A1", room.shelf.bytes_of(slot), due, f"slot {slot} through the layout's own tensors")


def _addresses(layout: SlotLayout) -> list[object]:
    tensors = [segment.data for slot in layout.slots for segment in slot]
    return [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]


# ----- A7, A10: bytes survive ---------------------------------------------------------------------


def _floats(_: Traits) -> st.SearchStrategy[Program]:
    return _with_parts(_parts(FLOATS, 0), 1)


def _play_floats(bench: Bench, found: Program) -> Play:
    parts = _layout(found)
    room = Room(shelf(bench, SLOTS, STAGING, parts), wild=parts[0].dtype.itemsize)
    yield from _play_calls(room, found)
    for what, blob, due in room.packed:
        equal("A7", blob, due, f"{parts[0].dtype}, {what}")
    count = room.shelf.store.conversions
    demand("A7", count == 0, f"{count} conversions between slots of equal strided descriptors")


def _private(_: Traits) -> st.SearchStrategy[Program]:
    """The last number of a part is its padding."""
    return _with_parts(_parts(FLOATS, PADDINGS), 2)


def _declared_private(traits: Traits) -> str | None:
    declared = SlotFormat.PRIVATE in traits.accelerator.slot_formats
    return None if declared else "slot_formats"


def _play_private(bench: Bench, found: Program) -> Play:
    """What fills a slot, or is read from it, is its whole storage."""
    parts = [
        Part(part.dtype, part.elements, format=SlotFormat.PRIVATE, padding=part.offset)
        for part in _layout(found)
    ]
    room = Room(shelf(bench, SLOTS, STAGING, parts))
    yield from _play_calls(room, found)
    sums = _add_up(room)
    bench.drain()
    for what, blob, due in room.packed:
        equal("A10", blob, due, f"in a private format, padding included, {what}")
    for slot, due in room.slots.items():
        equal("A10", room.shelf.bytes_of(slot), due, f"slot {slot}, the storage of its segments")
    _demand_sums("A10", sums)


# ----- A5: any mapping of slots to slots ----------------------------------------------------------

MANY = 4
"""Slots of a mapping."""


def _mappings(_: Traits) -> st.SearchStrategy[Program]:
    digits = st.lists(st.integers(0, MANY - 1), min_size=MANY, max_size=MANY)
    mapping = digits.map(lambda sources: "".join(map(str, sources)))
    kinds = st.sampled_from(("each", "shared"))
    step = st.builds(lambda kind, sources: Step(kind, (sources,)), kinds, mapping)
    return st.lists(step, min_size=1, max_size=3).map(program)


def _play_mappings(bench: Bench, found: Program) -> Play:
    """Step *each* brings every slot through a staging buffer of its own; in *shared*, slots with
    one source share a buffer. Digit k of the mapping is the slot whose contents go to slot k."""
    place = shelf(bench, MANY, MANY, [Part(torch.uint8, 3), Part(torch.int16, 2)])
    for slot in range(MANY):
        place.write([slot], slot + 1, ROLE)
    due = list(range(1, MANY + 1))
    for step in found.steps:
        sources = [int(digit) for digit in str(step.args[0])]
        _remap(place, step.op, sources)
        due = [due[source] for source in sources]
        yield NEXT
    blob = place.pack(range(MANY), ROLE)
    bench.drain()
    held = [sorted(set(row)) for row in blob.view(MANY, -1).tolist()]
    wanted = [[version] for version in due]
    demand("A5", held == wanted, f"slots hold what came from {held}, not from {wanted}")


def _remap(place: Shelf, kind: str, sources: list[int]) -> None:
    packed = sources if kind == "each" else sorted(set(sources))
    blob = place.pack(packed, ROLE)
    place.kept.append(blob)
    place.store.unpack(blob, range(len(packed)), place.stream(ROLE))
    buffers = range(MANY) if kind == "each" else [packed.index(source) for source in sources]
    place.store.commit(list(zip(buffers, range(MANY), strict=True)), place.stream(ROLE))


# ----- D4: one checksum everywhere ----------------------------------------------------------------


def _sums(_: Traits) -> st.SearchStrategy[Program]:
    return _with_parts(_parts(("uint8", "float32"), 0), 3)


def _play_sums(bench: Bench, found: Program) -> Play:
    """Behind each call, the checksums of everything that holds something."""
    room = Room(shelf(bench, SLOTS, STAGING, _layout(found)))
    seen: list[_Sums] = []
    for number, step in enumerate(found.steps, start=1):
        if step.op == "part":
            continue
        room.do(number, step)
        seen += [(f"step {number}: {what}", out, due) for what, out, due in _add_up(room)]
        yield NEXT
    bench.drain()
    _demand_sums("D4", seen)


def _add_up(room: Room) -> list[_Sums]:
    store, found = room.shelf.store, []
    for what, contents, verb in (
        ("slots", room.slots, store.checksum_slots),
        ("staging", room.staging, store.checksum_staging),
    ):
        if contents:
            numbers = sorted(contents)
            out = room.shelf.bench.empty((len(numbers),), torch.int64)
            verb(numbers, out, room.shelf.stream(ROLE))
            found.append((f"{what} {numbers}", out, [contents[number] for number in numbers]))
    return found


def _demand_sums(clause: str, seen: Sequence[_Sums]) -> None:
    for what, out, contents in seen:
        due = [as_int64(checksum(content)) for content in contents]
        demand(clause, out.tolist() == due, f"checksums of {what} are {out.tolist()}, not {due}")


PROPERTIES = (
    Property(
        name="a-slot-is-its-segments",
        family=FAMILY,
        clauses=("A6", "A1", "A4"),
        claim="Verbs move the bytes of every segment, at any offset, in place, and no others.",
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
        needs=_declared_private,
    ),
    Property(
        name="any-mapping-of-slots-ends-as-proposed",
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
        programs=_sums,
        play=_play_sums,
    ),
)
