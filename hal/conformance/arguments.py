"""Property of family *addresses* about bad arguments of the slot verbs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import NEXT, Bench, Play, attempt, demand, told
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.shelf import ROLES, Part, Shelf, shelf
from equipoise.hal.errors import SlotError, SlotLeased
from equipoise.hal.slots import SlotStore
from equipoise.hal.stream import Stream

COUNT = 2
"""Slots, and staging buffers."""
PARTS = [Part(torch.uint8, 4), Part(torch.int16, 2)]
SIZE = 8
"""Bytes of a slot."""
BEFORE = 0x77
"""What outputs hold before, and must hold after."""
ROLE = ROLES[1]


@dataclass
class _Desk:
    """A store with known contents, and outputs that no bad call may touch."""

    place: Shelf
    outputs: list[Tensor] = field(default_factory=list)

    @property
    def store(self) -> SlotStore:
        return self.place.store

    @property
    def stream(self) -> Stream:
        return self.place.stream(ROLE)

    def out(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """An output of so many elements."""
        made = self.place.bench.filled((count * dtype.itemsize,), BEFORE)
        self.outputs.append(made)
        return made.view(dtype)

    def source(self, *dtypes: torch.dtype, shape: tuple[int, ...] = (4,)) -> list[Tensor]:
        """Segments of a slot that do not fit, unless the dtypes are those of `PARTS`."""
        first, *rest = dtypes
        made = [self.place.bench.filled(shape, 1, first)]
        return made + [self.place.bench.filled((2,), 1, dtype) for dtype in rest]

    @property
    def fitting(self) -> list[Tensor]:
        return self.source(torch.uint8, torch.int16)


def _strided(tensor: Tensor) -> Tensor:
    return tensor[::2]


PACKS: Mapping[str, Callable[[_Desk], object]] = {
    "pack_unknown_slot": lambda d: d.store.pack([0, COUNT], d.out(2 * SIZE), d.stream),
    "pack_negative_slot": lambda d: d.store.pack([0, -1], d.out(2 * SIZE), d.stream),
    "pack_into_too_little": lambda d: d.store.pack([0, 1], d.out(2 * SIZE - 1), d.stream),
    "pack_into_too_much": lambda d: d.store.pack([0], d.out(2 * SIZE), d.stream),
    "pack_into_other_type": lambda d: d.store.pack([0], d.out(SIZE, torch.int8), d.stream),
    "pack_into_strides": lambda d: d.store.pack([0], _strided(d.out(2 * SIZE)), d.stream),
    "unpack_to_unknown": lambda d: d.store.unpack(d.out(2 * SIZE), [0, COUNT], d.stream),
    "unpack_to_negative": lambda d: d.store.unpack(d.out(2 * SIZE), [0, -1], d.stream),
    "unpack_too_little": lambda d: d.store.unpack(d.out(2 * SIZE - 1), [0, 1], d.stream),
    "unpack_too_much": lambda d: d.store.unpack(d.out(2 * SIZE), [0], d.stream),
}
COMMITS: Mapping[str, Callable[[_Desk], object]] = {
    "commit_to_unknown": lambda d: d.store.commit([(0, 0), (1, COUNT)], d.stream),
    "commit_to_negative": lambda d: d.store.commit([(0, 0), (1, -1)], d.stream),
    "commit_of_unknown": lambda d: d.store.commit([(0, 0), (COUNT, 1)], d.stream),
    "commit_of_negative": lambda d: d.store.commit([(0, 0), (-1, 1)], d.stream),
}
WRITES: Mapping[str, Callable[[_Desk], object]] = {
    "write_to_unknown": lambda d: d.store.write([0, COUNT], [d.fitting, d.fitting], d.stream),
    "write_to_negative": lambda d: d.store.write([0, -1], [d.fitting, d.fitting], d.stream),
    "write_of_too_few": lambda d: d.store.write([0, 1], [d.fitting], d.stream),
    "write_of_other_type": lambda d: d.store.write(
        [0, 1], [d.fitting, d.source(torch.int8, torch.int16)], d.stream
    ),
    "write_of_other_shape": lambda d: d.store.write(
        [0, 1], [d.fitting, d.source(torch.uint8, torch.int16, shape=(2, 2))], d.stream
    ),
    "write_without_segment": lambda d: d.store.write(
        [0, 1], [d.fitting, d.source(torch.uint8)], d.stream
    ),
    "write_of_strides": lambda d: d.store.write(
        [0, 1],
        [d.fitting, [_strided(d.place.bench.filled((8,), 1)), d.fitting[1]]],
        d.stream,
    ),
}
SUMS: Mapping[str, Callable[[_Desk], object]] = {
    "sum_of_unknown_slot": lambda d: d.store.checksum_slots(
        [0, COUNT], d.out(2, torch.int64), d.stream
    ),
    "sum_into_other_type": lambda d: d.store.checksum_slots([0], d.out(1, torch.int32), d.stream),
    "sum_into_too_much": lambda d: d.store.checksum_slots([0], d.out(2, torch.int64), d.stream),
    "sum_of_unknown_staging": lambda d: d.store.checksum_staging(
        [0, COUNT], d.out(2, torch.int64), d.stream
    ),
    "staging_sum_into_too_much": lambda d: d.store.checksum_staging(
        [0], d.out(2, torch.int64), d.stream
    ),
}
LEASES: Mapping[str, Callable[[_Desk], object]] = {
    "lease_of_unknown": lambda d: d.store.lease([0, COUNT]),
    "lease_of_negative": lambda d: d.store.lease([0, -1]),
}
CALLS = {**PACKS, **COMMITS, **WRITES, **SUMS, **LEASES}
"""One bad argument each; where a call takes many, the second is bad."""


def _programs(_: Traits) -> st.SearchStrategy[Program]:
    steps = st.sampled_from(sorted(CALLS)).map(Step)
    return st.lists(steps, min_size=1, max_size=4).map(program)


def _play(bench: Bench, found: Program) -> Play:
    desk = _Desk(shelf(bench, COUNT, COUNT, PARTS))
    for number in range(COUNT):
        desk.place.write([number], number + 1, ROLE)
        desk.place.unpack([number], COUNT + number + 1, ROLE)
    for step in found.steps:
        refusal = attempt(partial(CALLS[step.op], desk), Exception)
        named = f"{type(refusal).__name__}: {refusal}" if refusal else "nothing"
        demand("A8", isinstance(refusal, SlotError), f"{step} raised {named}, not a SlotError")
        yield NEXT
    held = desk.place.pack(range(COUNT), ROLE)
    leased = attempt(partial(_commit_all, desk), SlotLeased)
    demand("A8", not leased, f"a refused lease holds slots: {leased}")
    staged = desk.place.pack(range(COUNT), ROLE)
    bench.drain()
    for what, blob, due in (("slots", held, (1, 2)), ("staging", staged, (3, 4))):
        rows = [sorted(set(row)) for row in blob.view(COUNT, SIZE).tolist()]
        demand("A8", rows == [[v] for v in due], f"a refused call changed {what}: {rows}")
    touched = any(bool((told(output) != BEFORE).any()) for output in desk.outputs)
    demand("A8", not touched, "a refused call wrote to its output")


def _commit_all(desk: _Desk) -> None:
    desk.store.commit([(number, number) for number in range(COUNT)], desk.stream)


PROPERTIES = (
    Property(
        name="a-bad-argument-changes-nothing",
        family="addresses",
        clauses=("A8",),
        claim="A slot verb with one bad argument raises SlotError, and nothing else happens.",
        programs=_programs,
        play=_play,
    ),
)
