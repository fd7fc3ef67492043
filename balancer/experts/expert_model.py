"""The expert weights of one model on one rank, as the engine sees them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from equipoise.balancer.experts.placement import Shape
from equipoise.balancer.experts.slot_tensors import Column
from equipoise.hal.errors import PlacementError, RegistrationError
from equipoise.hal.slots import Segment, SegmentType, SlotLayout

Kind = tuple[tuple[SegmentType, tuple[int, ...]], ...]
"""What the layers of a family have in common: each segment's type and order in memory."""


@dataclass(frozen=True, eq=False)
class LayerColumns:
    """One layer's tensors, by name.

    Attributes:
        number: the model's own number of the layer.
        columns: sorted by name, so that every rank packs a slot alike whatever the order of
            registration was.
    """

    number: int
    columns: tuple[Column, ...]

    @property
    def kind(self) -> Kind:
        """Slots of layers of one kind can be kept in one slot store."""
        return tuple((column.segments[0].type, column.order) for column in self.columns)

    @property
    def slots(self) -> tuple[tuple[Segment, ...], ...]:
        """Segments by local slot."""
        return tuple(zip(*(column.segments for column in self.columns), strict=True))

    def is_memory_of(self, other: "LayerColumns") -> bool:
        """Whether both are the same weights: every slot of every tensor at the same address."""
        return self.kind == other.kind and self._addresses == other._addresses

    @property
    def _addresses(self) -> tuple[int, ...]:
        return tuple(segment.data.data_ptr() for slot in self.slots for segment in slot)


@dataclass(frozen=True)
class Location:
    """A slot: which family's store holds it, and its number there."""

    family: int
    number: int


@dataclass(frozen=True, eq=False)
class Family:
    """Layers whose slots have one descriptor, and so one slot store.

    Attributes:
        layers: rows of a placement, ascending.
        slots: segments by number: place in `layers` * slots_per_rank + local slot.
        columns: of its first layer, for the shapes that the model has.
    """

    layers: tuple[int, ...]
    slots: tuple[tuple[Segment, ...], ...]
    columns: tuple[Column, ...]

    def layout(self, staging: int) -> SlotLayout:
        """What `Accelerator.slot_store` takes, with so many staging buffers."""
        return SlotLayout(self.slots, staging)

    @property
    def descriptor(self) -> tuple[SegmentType, ...]:
        """Segment types of a slot, in order."""
        return tuple(segment.type for segment in self.slots[0])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(segment.nbytes for segment in self.descriptor)

    @property
    def nbytes(self) -> int:
        """Bytes of all its slots."""
        return self.slot_bytes * len(self.slots)

    def sources(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """One expert's tensors by name, shaped as the model has them, for `SlotStore.write`.

        Raises:
            RegistrationError: other names than those that were registered.
        """
        names = [column.place.tensor for column in self.columns]
        if set(tensors) != set(names):
            raise RegistrationError(f"an expert has {names}, got {sorted(tensors)}")
        return tuple(column.arranged(tensors[column.place.tensor]) for column in self.columns)


@dataclass(frozen=True, eq=False)
class ExpertModel:
    """What `ModelRegistry.finalize` gives. Layers are rows of a placement, 0, 1, ...

    Streams that read the slots are not its business: each is attached to the slot store of every
    family that it reads, `SlotStore.attach`, for as long as it does.

    Attributes:
        name: among the models of one engine.
        experts: logical experts a layer.
        slots_per_rank: slots of this rank, per layer.
        device: where all the weights are.
        numbers: the model's own number of each layer, ascending.
        entries: how often a step enters each layer, under all its numbers.
        repeats: numbers that stand for the same weights as another, and that other number.
        families: by descriptor, in the order of their first layers.
        notes: what `finalize` excused, one line each.
    """

    name: str
    experts: int
    slots_per_rank: int
    device: torch.device
    numbers: tuple[int, ...]
    entries: tuple[int, ...]
    repeats: Mapping[int, int]
    families: tuple[Family, ...]
    notes: tuple[str, ...]

    @property
    def layers(self) -> int:
        """How many layers are placed; a repeat adds none."""
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of this rank."""
        return sum(family.nbytes for family in self.families)

    def shape(self, ranks: int) -> Shape:
        """Of its placements. Raises `PlacementError` where the slots cannot hold the experts."""
        return Shape(self.layers, self.experts, self.slots_per_rank * ranks, ranks)

    def layer(self, number: int) -> int:
        """The row of a placement for the model's own number of a layer.

        A repeat has the row of what it repeats. Raises `RegistrationError` for an unknown number.
        """
        found = self._rows.get(self.repeats.get(number, number))
        if found is None:
            raise RegistrationError(f"model {self.name!r} has no layer {number} registered")
        return found

    def locate(self, layer: int, slot: int) -> Location:
        """Where the weights of a local slot of a layer are. Raises `PlacementError`."""
        if not (0 <= layer < self.layers and 0 <= slot < self.slots_per_rank):
            raise PlacementError(
                f"model {self.name!r}: no slot {slot} in layer {layer}, it has "
                f"{self.layers} layers of {self.slots_per_rank} slots a rank"
            )
        home = self._homes[layer]
        return Location(home.family, home.number + slot)

    @property
    def digest(self) -> str:
        """Hexadecimal; equal on ranks whose slots can be exchanged."""
        state = blake2b(digest_size=16)
        counts = (self.experts, self.slots_per_rank)
        words = (self.name, counts, self.numbers, self.entries, sorted(self.repeats.items()))
        state.update(repr(words).encode())
        for family in self.families:
            orders = tuple(column.order for column in family.columns)
            state.update(repr((family.layers, family.descriptor, orders)).encode())
        return state.hexdigest()

    def describe(self) -> str:
        """One line a family, one a repeat, one for everything excused."""
        families = [self.family_line(number) for number in range(len(self.families))]
        repeats = [f"layer {one} repeats layer {other}" for one, other in self.repeats.items()]
        return "\n".join(f"{self.name}: {line}" for line in (*families, *repeats, *self.notes))

    def family_line(self, number: int) -> str:
        """What a family is, in one line."""
        family = self.families[number]
        own = ranges([self.numbers[layer] for layer in family.layers])
        parts = ", ".join(
            f"{kind.name} {str(kind.dtype).removeprefix('torch.')} {list(kind.shape)}"
            for kind in family.descriptor
        )
        return (
            f"family {number}: layers {own}, {len(family.slots)} slots of "
            f"{family.slot_bytes} bytes: {parts}"
        )

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {number: row for row, number in enumerate(self.numbers)}

    @cached_property
    def _homes(self) -> dict[int, Location]:
        return {
            layer: Location(number, place * self.slots_per_rank)
            for number, family in enumerate(self.families)
            for place, layer in enumerate(family.layers)
        }


def families_of(layers: tuple[LayerColumns, ...]) -> tuple[Family, ...]:
    """Group layers, given by row of the placement, by their kind."""
    kinds: dict[Kind, list[int]] = {}
    for row, layer in enumerate(layers):
        kinds.setdefault(layer.kind, []).append(row)
    return tuple(
        Family(
            layers=tuple(rows),
            slots=tuple(slot for row in rows for slot in layers[row].slots),
            columns=layers[rows[0]].columns,
        )
        for rows in kinds.values()
    )


def ranges(numbers: list[int]) -> str:
    """Ascending numbers in short: `3..60, 62`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("..".join(map(str, run)) for run in runs)
