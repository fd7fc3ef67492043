"""The first 64 bytes of every message: which message it is.

Where the tensors of a shape class lie in a message.

The messages of the shape classes that an end has met.

Tensors into a message, and out of it.
"""

import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from equipoise.hal.errors import MessageMismatch, ShapeClassError
from equipoise.pipeline.channel.edge import Edge
from equipoise.pipeline.channel.schema import (
    Constant,
    MessageSchema,
    SliceMode,
    TensorField,
    same_constant,
)
from equipoise.pipeline.channel.statistics import EdgeCounters

HEADER_WORDS = 8
HEADER_BYTES = 8 * HEADER_WORDS
_SIGN = 0x4571_7569_706F_6973
"""Begins every header."""
_PACKED = struct.Struct(f"={HEADER_WORDS}q")


@dataclass(frozen=True)
class Header:
    """Which message this is.

    Attributes:
        sequence: messages of this edge before it.
        schema_digest: digest of its class.
        nbytes: of the message: header, payload and description.
        first_part_bytes: bytes of its first part; the rest follows in a part of its own.
        description_bytes: bytes behind the payload that describe the class to whoever has not met it.
    """

    sequence: int
    schema_digest: int
    nbytes: int
    first_part_bytes: int
    description_bytes: int = 0

    def write(self, words: memoryview) -> None:
        """Into int64 [1, 8] in the host's memory."""
        fields = (
            _SIGN,
            self.sequence,
            self.schema_digest,
            self.nbytes,
            self.first_part_bytes,
            self.description_bytes,
        )
        _PACKED.pack_into(words, 0, *fields, 0, _folded(fields))


def read_header(words: Sequence[int], edge: str) -> Header:
    """From the eight words.

    Raises:
        MessageMismatch: these are not a header's bytes, or not whole.
    """
    *fields, nothing, check = words
    if fields[0] != _SIGN or nothing or _folded(fields) != check:
        raise MessageMismatch(f"{edge}: what arrived does not begin as a message does")
    return Header(*fields[1:])


def _folded(fields: Sequence[int]) -> int:
    folded = 0
    for field in fields:
        folded ^= field
    return folded


ALIGNMENT = 64
"""Every tensor begins at a multiple of so many bytes: views of any dtype are possible there."""


@dataclass(frozen=True)
class FieldLayout:
    """One field in a message.

    Attributes:
        field: which.
        offset: byte at which its part begins.
        nbytes: of the part that travels.
        num_slices: ranks that send a part each: 1 where it travels whole.
        gathered_offset: byte at which the whole begins in the memory for what is gathered.
    """

    field: TensorField
    offset: int
    nbytes: int
    num_slices: int
    gathered_offset: int

    def sent_bytes(self, message: Tensor) -> Tensor:
        """What travels, where it lies in a message: uint8 [nbytes]."""
        return message[self.offset : self.offset + self.nbytes]

    def gathered_bytes(self, wholes: Tensor) -> Tensor:
        """The whole of a sliced field, where it is gathered: uint8 [parts, nbytes]."""
        end = self.gathered_offset + self.field.nbytes
        return wholes[self.gathered_offset : end].view(self.num_slices, self.nbytes)

    def sent_view(self, message: Tensor) -> Tensor:
        """What travels, where it lies in a message: the tensor, or its slice [elements]."""
        typed = self.sent_bytes(message).view(self.field.dtype)
        return typed.view(self.field.shape) if self.num_slices == 1 else typed

    def sent_tensor(self, message: Tensor) -> Tensor:
        """The same, as a tensor of its own over the memory."""
        dtype = self.field.dtype
        shape = self.field.shape if self.num_slices == 1 else (self.nbytes // dtype.itemsize,)
        return typed_view(message, self.offset, shape, dtype)

    def gathered_view(self, wholes: Tensor) -> Tensor:
        """The whole of a sliced field, where it lies in the memory for what is gathered."""
        end = self.gathered_offset + self.field.nbytes
        return wholes[self.gathered_offset : end].view(self.field.dtype).view(self.field.shape)


@dataclass(frozen=True)
class MessageLayout:
    """A message: the header, then every field's part.

    Attributes:
        schema: what travels.
        fields: its fields, in their order.
        nbytes: of the message, header included.
        gathered_nbytes: of the memory for what is gathered: the headers of all slices' messages,
            then the wholes of sliced fields; 0 where there are none.
    """

    schema: MessageSchema
    fields: tuple[FieldLayout, ...]
    nbytes: int
    gathered_nbytes: int

    @property
    def sliced_fields(self) -> tuple[FieldLayout, ...]:
        """Fields of which only a slice travels."""
        return tuple(place for place in self.fields if place.num_slices > 1)


def message_layout(shape_class: MessageSchema, parts: int = 1) -> MessageLayout:
    """The message of a class.

    Args:
        shape_class: what travels.
        parts: ranks of the sending group. A field that is declared sliced travels whole where its
            elements cannot be divided among them.
    """
    places, end, wholes = [], HEADER_BYTES, HEADER_BYTES * parts
    for field in shape_class.fields:
        slices = parts if _divides(parts, field) else 1
        nbytes = field.nbytes // slices
        places.append(FieldLayout(field, end, nbytes, slices, wholes))
        end = _aligned(end + nbytes)
        wholes += _aligned(field.nbytes) if slices > 1 else 0
    sliced = any(place.num_slices > 1 for place in places)
    return MessageLayout(shape_class, tuple(places), end, wholes if sliced else 0)


def typed_view(memory: Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor over uint8 [n], from byte `at` on: one reference to the memory, where a
    slice that is viewed as another type, and then as another shape, is two. Any thread may write to
    it, in inference mode or not."""
    first = (memory.storage_offset() + at) // dtype.itemsize
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    with torch.inference_mode(False):
        made = torch.empty(0, dtype=dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), first, shape, strides)


def _divides(parts: int, field: TensorField) -> bool:
    elements = field.nbytes // field.dtype.itemsize
    return field.slice_mode is SliceMode.SLICED and elements % parts == 0


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


MAX_CACHED_LAYOUTS = 1024
"""Classes that are remembered: those that were used last. Both ends see the same messages in the
same order, so both forget the same ones."""


@dataclass(frozen=True)
class CachedLayout:
    """A class's message, and whether none of it has gone before, that one could remember."""

    layout: MessageLayout
    is_new: bool


class LayoutCache:
    """Layouts by class; classes are told apart by their digests, since 1 and True are not one
    constant, though they are equal.

    Args:
        parts: slices that a sliced tensor is cut into.
        meter: counts the classes.
    """

    def __init__(self, parts: int, meter: EdgeCounters) -> None:
        self._parts = parts
        self._meter = meter
        self._layouts: OrderedDict[int, MessageLayout] = OrderedDict()

    def lookup(self, shape_class: MessageSchema) -> CachedLayout:
        """The message of a class; nothing is remembered until it is met."""
        known = self._layouts.get(shape_class.digest)
        if known is not None:
            return CachedLayout(known, is_new=False)
        return CachedLayout(message_layout(shape_class, self._parts), is_new=True)

    def find(self, digest: int) -> MessageLayout | None:
        """The message of a class that was met."""
        return self._layouts.get(digest)

    def remember(self, met: CachedLayout) -> None:
        """A message of the class goes, or has come."""
        digest = met.layout.schema.digest
        if met.is_new:
            self._layouts[digest] = met.layout
            self._meter.add_schema()
        self._layouts.move_to_end(digest)
        if len(self._layouts) > MAX_CACHED_LAYOUTS:
            self._layouts.popitem(last=False)


Tensors = Mapping[str, Tensor | Constant]


def check_matches_schema(edge: Edge, shape_class: MessageSchema, tensors: Tensors) -> None:
    """Raise `ShapeClassError` unless these are tensors of that class, on the edge's device."""
    device = edge.accelerator.device
    constants = dict(shape_class.constants)
    if len(tensors) != len(shape_class.fields) + len(constants):
        raise ShapeClassError(f"{edge.name}: got {sorted(tensors)}, it carries {shape_class}")
    for field in shape_class.fields:
        found = tensors.get(field.name)
        if not isinstance(found, Tensor) or not _fits(found, field):
            said = _described(found)
            raise ShapeClassError(f"{edge.name}: {field.name} is {said}, it carries {shape_class}")
        if found.device != device:
            raise ShapeClassError(f"{edge.name}: {field.name} is on {found.device}, not {device}")
    for name, value in constants.items():
        if not same_constant(tensors.get(name), value):
            raise ShapeClassError(f"{edge.name}: {name} is not {value!r}")


def check_in_place(edge: Edge, layout: MessageLayout, tensors: Tensors, message: Tensor) -> None:
    """Raise `ShapeClassError` where a tensor lies in the message, but not in its place."""
    ring, begin = message.untyped_storage().data_ptr(), message.data_ptr()
    for place in layout.fields:
        value = tensors[place.field.name]
        assert isinstance(value, Tensor)  # a field of the layout
        if not value.numel() or value.untyped_storage().data_ptr() != ring:
            continue
        in_place = value.data_ptr() == begin + place.offset and value.is_contiguous()
        if place.num_slices > 1 or not in_place:
            name = place.field.name
            raise ShapeClassError(f"{edge.name}: {name} lies in the buffer, but not in its place")


def pack(edge: Edge, layout: MessageLayout, tensors: Tensors, parts: Sequence[Tensor]) -> None:
    """Every field's part into its place, in the order of the current stream, unless it is there.

    Args:
        edge: says which slice is this rank's.
        layout: of the message.
        tensors: by name, of the layout's class.
        parts: the fields' places in the message, in the order of the layout.
    """
    for place, part in zip(layout.fields, parts, strict=True):
        value = tensors[place.field.name]
        assert isinstance(value, Tensor)  # a field of the layout
        if value.data_ptr() != part.data_ptr():
            part.copy_(_part(edge, place, value))


def unpack(layout: MessageLayout, message: Tensor, wholes: Tensor) -> dict[str, Tensor]:
    """The tensors of a message by name, where they lie or will lie."""
    return {
        place.field.name: place.sent_view(message)
        if place.num_slices == 1
        else place.gathered_view(wholes)
        for place in layout.fields
    }


def bytes_to_tensor(text: bytes) -> Tensor:
    """uint8 [n], in the host's memory."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def header_views(memory: Tensor, count: int) -> Tensor:
    """So many headers, one behind the other from the beginning of uint8 [n]: int64 [count, 8]."""
    return memory[: count * HEADER_BYTES].view(torch.int64).view(count, HEADER_WORDS)


def _part(edge: Edge, place: FieldLayout, tensor: Tensor) -> Tensor:
    if place.num_slices == 1 or edge.slice_group is None:
        return tensor
    return tensor.reshape(place.num_slices, -1)[edge.slice_group.rank]


def _fits(tensor: Tensor, field: TensorField) -> bool:
    return tensor.dtype == field.dtype and tuple(tensor.shape) == field.shape


def _described(found: Tensor | Constant) -> str:
    if isinstance(found, Tensor):
        return f"{list(found.shape)} {found.dtype}"
    return "missing" if found is None else repr(found)
