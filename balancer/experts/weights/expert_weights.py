"""The expert weights of one model on one rank: from the tensors of layers to segments of slots.

A model passes its weights *stacked*, as one tensor with the slots in the leading dimension, or as a
*sequence*, one tensor per slot. A slot store takes contiguous segments of equal descriptors.
Nothing is copied: a segment is a view of the model's own memory, because that is the memory which
kernels and captured graphs read.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor

from equipoise.balancer.experts.placement import ExpertShape, format_ranges
from equipoise.hal.capabilities import SlotFormat
from equipoise.hal.errors import PlacementError, RegistrationError
from equipoise.hal.slots import Segment, SegmentType, SlotLayout

SlotTensors = Tensor | Iterable[Tensor]
"""Stacked, [slots_per_rank, ...], or one tensor per slot."""
FormatOf = Callable[[Tensor], SlotFormat]
"""Returns how the bytes of a tensor are laid out, which only the backend knows."""


def strided(tensor: Tensor) -> SlotFormat:
    """Returns `STRIDED` for every tensor, for backends without private formats."""
    return SlotFormat.STRIDED


@dataclass(frozen=True)
class TensorName:
    """The model, layer and name of a tensor; every error about the tensor gives them."""

    model: str
    layer: int
    name: str

    def __str__(self) -> str:
        return f"layer {self.layer}, tensor {self.name!r}"

    def error(self, what: str) -> RegistrationError:
        """An error about this tensor, in one line."""
        return RegistrationError(f"model {self.model!r}, {self}: {what}")


@dataclass(frozen=True, eq=False)
class SlotTensor:
    """One named tensor of a layer, slot by slot.

    Attributes:
        tensor_name: model, layer and name.
        segments: by local slot.
        order: the model's dimensions in memory order, outermost first. Scales are often stored in
            column-major order; their bytes are dense all the same.
    """

    tensor_name: TensorName
    segments: tuple[Segment, ...]
    order: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """The device of all segments."""
        return self.segments[0].data.device

    def to_memory_order(self, tensor: Tensor) -> Tensor:
        """Returns one expert's tensor, given in the model's shape, in the order of a segment."""
        return tensor.detach().permute(self.order).contiguous()


def slot_tensor(
    name: TensorName, value: SlotTensors, slots_per_rank: int, format_of: FormatOf
) -> SlotTensor:
    """Builds the slots' segments of one named tensor. Raises `RegistrationError`."""
    # A view that is made in inference mode cannot be written outside of it, and the worker that
    # commits a rebalance runs outside.
    with torch.inference_mode(False), torch.no_grad():
        tensors = _by_slot(name, value, slots_per_rank, format_of)
        for number, tensor in enumerate(tensors):
            if tensor.device != tensors[0].device:
                here, there = tensor.device, tensors[0].device
                raise name.error(f"slot {number} is on {here}, slot 0 on {there}")
            _check_kind(name, tensor)
            _check_alike(name, tensor, number, tensors[0])
        order = memory_order(tensors[0])
        segments = tuple(_segment(name, tensor, order, format_of) for tensor in tensors)
    for number, segment in enumerate(segments):
        if segment.type != segments[0].type:
            raise name.error(f"slot {number} is {segment.type}, slot 0 is {segments[0].type}")
    return SlotTensor(name, segments, order)


def is_on_device(at: torch.device, device: torch.device) -> bool:
    """Whether `at` is the wanted device; a wanted device without an index is any of its type."""
    return at.type == device.type and device.index in (None, at.index)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions by falling stride; those of size 1, whose strides mean nothing, come last."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    steps = [0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -steps[dim]))


def _by_slot(
    name: TensorName, value: SlotTensors, slots_per_rank: int, format_of: FormatOf
) -> tuple[Tensor, ...]:
    if not isinstance(value, Tensor):
        return _check_sequence(name, value, slots_per_rank)
    _check_kind(name, value)
    if value.dim() == 0:
        raise name.error(f"is one number, not one for each of {slots_per_rank} slots")
    if value.shape[0] != slots_per_rank:
        raise name.error(f"stacks {value.shape[0]} slots, a rank has {slots_per_rank}")
    if format_of(value) is not SlotFormat.STRIDED:
        # A private format cannot be cut: it needs offset 0 and a storage to itself (clause A6).
        raise name.error(f"is stacked in a {format_of(value)} format; register one a slot")
    if slots_per_rank > 1 and value.stride(0) == 0:
        raise name.error("is expanded: all its slots are the same memory")
    return value.detach().unbind(0)


def _check_sequence(
    name: TensorName, value: Iterable[Tensor], slots_per_rank: int
) -> tuple[Tensor, ...]:
    if not isinstance(value, Iterable):
        raise name.error(f"is a {type(value).__name__}, neither a tensor nor one a slot")
    tensors = tuple(value)
    if len(tensors) != slots_per_rank:
        raise name.error(f"has {len(tensors)} tensors, a rank has {slots_per_rank} slots")
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise name.error(f"slot {number} is a {type(tensor).__name__}, not a tensor")
    return tensors


def _check_kind(name: TensorName, tensor: Tensor) -> None:
    """Refuses tensors without plain memory of their own, or whose memory no model reads."""
    if hasattr(tensor, "__tensor_flatten__"):
        raise name.error(f"is a {type(tensor).__name__}; register the tensors that it wraps")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise name.error(f"is {tensor.layout} of {tensor.dtype}; only plain tensors can move")
    if tensor.device.type == "meta" or torch.nn.parameter.is_lazy(tensor):
        raise name.error("has no memory yet; register after the weights are loaded")
    if tensor.is_conj() or tensor.is_neg():
        raise name.error("is a lazy conjugate or negative; its memory holds other values")
    if tensor.grad_fn is not None and not tensor._is_view():
        raise name.error("is the result of a computation, not what the model holds")
    if tensor.numel() == 0:
        raise name.error(f"of shape {list(tensor.shape)} holds nothing; leave it out")


def _check_alike(name: TensorName, tensor: Tensor, number: int, first: Tensor) -> None:
    """Checks that equal bytes mean equal values in every slot."""
    for aspect, mine, other in (
        ("of shape", list(tensor.shape), list(first.shape)),
        ("of", tensor.dtype, first.dtype),
        ("in memory order", memory_order(tensor), memory_order(first)),
    ):
        if mine != other:
            raise name.error(f"slot {number} is {aspect} {mine}, slot 0 {aspect} {other}")


def _segment(
    name: TensorName, tensor: Tensor, order: tuple[int, ...], format_of: FormatOf
) -> Segment:
    form = format_of(tensor)
    data = _outside_inference(tensor.detach()).permute(order)
    if not data.is_contiguous():
        shape, strides = list(tensor.shape), list(tensor.stride())
        raise name.error(f"a slot of shape {shape} and strides {strides} is not dense")
    if form is SlotFormat.PRIVATE and data.storage_offset() != 0:
        raise name.error("a private format needs storage offset 0 and a storage to itself")
    segment = Segment(name.name, data, form)
    if form is SlotFormat.STRIDED:
        _check_bytes(name, segment)
    return segment


def _check_bytes(name: TensorName, segment: Segment) -> None:
    """Checks that the bytes can be viewed, now rather than at the first copy."""
    try:
        byte_view = segment.bytes
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise name.error(f"{segment.data.dtype} cannot be shown as bytes: {why}") from error
    if byte_view.data_ptr() != segment.data.data_ptr():
        raise name.error(f"{segment.data.dtype} shows its bytes only in a copy")


def _outside_inference(tensor: Tensor) -> Tensor:
    """Returns a tensor over the same memory that is writable outside inference mode too."""
    if not tensor.is_inference():
        return tensor
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage()
    return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


LayerKind = tuple[tuple[SegmentType, tuple[int, ...]], ...]
"""What the layers of a layer group have in common: each segment's type and memory order."""


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """One layer's tensors, by name.

    Attributes:
        number: the model's own number of the layer.
        tensors: sorted by name, so that every rank packs a slot alike whatever the order of
            registration was.
    """

    number: int
    tensors: tuple[SlotTensor, ...]

    @property
    def kind(self) -> LayerKind:
        """Layers of the same kind can have one slot store."""
        return tuple((column.segments[0].type, column.order) for column in self.tensors)

    @property
    def slots(self) -> tuple[tuple[Segment, ...], ...]:
        """Segments of each local slot."""
        return tuple(zip(*(column.segments for column in self.tensors), strict=True))

    def same_memory(self, other: "LayerTensors") -> bool:
        """Whether both have the same weights: every slot of every tensor at the same address."""
        return self.kind == other.kind and self._addresses == other._addresses

    @property
    def _addresses(self) -> tuple[int, ...]:
        return tuple(segment.data.data_ptr() for slot in self.slots for segment in slot)


@dataclass(frozen=True)
class SlotLocation:
    """The location of a slot: the layer group whose store holds it, and its number there."""

    group: int
    number: int


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers whose slots have one descriptor, and therefore one slot store.

    Attributes:
        layers: rows of a placement, ascending.
        slots: segments by slot number: index in `layers` * slots_per_rank + local slot.
        tensors: those of the first layer, for the shapes that the model has.
    """

    layers: tuple[int, ...]
    slots: tuple[tuple[Segment, ...], ...]
    tensors: tuple[SlotTensor, ...]

    def layout(self, staging: int) -> SlotLayout:
        """Returns the layout for `Accelerator.slot_store`, with `staging` staging buffers."""
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
        """Returns one expert's tensors, given by name in the model's shapes, for `SlotStore.write`.

        Raises:
            RegistrationError: the names differ from those that were registered.
        """
        names = [column.tensor_name.name for column in self.tensors]
        if set(tensors) != set(names):
            raise RegistrationError(f"an expert has {names}, got {sorted(tensors)}")
        return tuple(
            column.to_memory_order(tensors[column.tensor_name.name]) for column in self.tensors
        )


@dataclass(frozen=True, eq=False)
class ExpertModel:
    """The registered model, as `ModelRegistry.finalize` returns it. Layers are placement rows.

    Streams that read the slots are not part of it: each is attached to the slot store of every
    layer group that it reads (`SlotStore.attach`), for as long as it reads.

    Attributes:
        name: unique among the models of one engine.
        experts: logical experts per layer.
        slots_per_rank: slots of this rank, per layer.
        device: where all the weights are.
        layer_numbers: the model's own number of each layer, ascending.
        entries_per_step: how often a step enters each layer, under all its numbers.
        repeats: layer numbers that share the weights of another number, mapped to that number.
        groups: layer groups, in the order of their first layers.
        notes: what `finalize` excused, one line each.
    """

    name: str
    experts: int
    slots_per_rank: int
    device: torch.device
    layer_numbers: tuple[int, ...]
    entries_per_step: tuple[int, ...]
    repeats: Mapping[int, int]
    groups: tuple[LayerGroup, ...]
    notes: tuple[str, ...]

    @property
    def layers(self) -> int:
        """Number of layers in a placement; a repeat adds none."""
        return len(self.layer_numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of this rank."""
        return sum(group.nbytes for group in self.groups)

    def shape(self, ranks: int) -> ExpertShape:
        """Shape of its placements. Raises `PlacementError` if the slots cannot hold the experts."""
        return ExpertShape(self.layers, self.experts, self.slots_per_rank * ranks, ranks)

    def layer(self, number: int) -> int:
        """Returns the placement row of a layer, given by the model's own number.

        A repeat has the row of the layer that it repeats. Raises `RegistrationError` for an unknown
        number.
        """
        row = self._rows.get(self.repeats.get(number, number))
        if row is None:
            raise RegistrationError(f"model {self.name!r} has no layer {number!r} registered")
        return row

    def locate(self, layer: int, slot: int) -> SlotLocation:
        """Returns the location of a local slot of a layer. Raises `PlacementError`."""
        if not (0 <= layer < self.layers and 0 <= slot < self.slots_per_rank):
            raise PlacementError(
                f"model {self.name!r}: no slot {slot} in layer {layer}, it has "
                f"{self.layers} layers of {self.slots_per_rank} slots a rank"
            )
        location = self._locations[layer]
        return SlotLocation(location.group, location.number + slot)

    @property
    def digest(self) -> str:
        """Hexadecimal digest, equal on ranks that can exchange slots."""
        state = blake2b(digest_size=16)
        counts = (self.experts, self.slots_per_rank)
        words = (
            self.name,
            counts,
            self.layer_numbers,
            self.entries_per_step,
            sorted(self.repeats.items()),
        )
        state.update(repr(words).encode())
        for group in self.groups:
            orders = tuple(column.order for column in group.tensors)
            state.update(repr((group.layers, group.descriptor, orders)).encode())
        return state.hexdigest()

    def describe(self) -> str:
        """One line per layer group, per repeat, and per excused tensor."""
        groups = [self.group_line(number) for number in range(len(self.groups))]
        repeats = [
            f"layer {number} repeats layer {original}" for number, original in self.repeats.items()
        ]
        return "\n".join(f"{self.name}: {line}" for line in (*groups, *repeats, *self.notes))

    def group_line(self, number: int) -> str:
        """Describes a layer group in one line."""
        group = self.groups[number]
        own = format_ranges([self.layer_numbers[layer] for layer in group.layers])
        parts = ", ".join(
            f"{kind.name} {str(kind.dtype).removeprefix('torch.')} {list(kind.shape)}"
            for kind in group.descriptor
        )
        return (
            f"layer group {number}: layers {own}, {len(group.slots)} slots of "
            f"{group.slot_bytes} bytes: {parts}"
        )

    @cached_property
    def _rows(self) -> dict[int, int]:
        return {number: row for row, number in enumerate(self.layer_numbers)}

    @cached_property
    def _locations(self) -> dict[int, SlotLocation]:
        return {
            layer: SlotLocation(number, row * self.slots_per_rank)
            for number, group in enumerate(self.groups)
            for row, layer in enumerate(group.layers)
        }


def layer_groups(layers: tuple[LayerTensors, ...]) -> tuple[LayerGroup, ...]:
    """Groups layers, given by placement row, by their kind."""
    kinds: dict[LayerKind, list[int]] = {}
    for row, layer in enumerate(layers):
        kinds.setdefault(layer.kind, []).append(row)
    return tuple(
        LayerGroup(
            layers=tuple(rows),
            slots=tuple(slot for row in rows for slot in layers[row].slots),
            tensors=layers[rows[0]].tensors,
        )
        for rows in kinds.values()
    )
