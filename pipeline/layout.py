"""Where the tensors of a shape class lie in a message."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from equipoise.pipeline.header import HEADER_BYTES
from equipoise.pipeline.shape_class import Field, ShapeClass, Split

ALIGNMENT = 64
"""Every tensor begins at a multiple of so many bytes: views of any dtype are possible there."""


@dataclass(frozen=True)
class Place:
    """One field in a message.

    Attributes:
        field: which.
        offset: byte at which its part begins.
        nbytes: of the part that travels.
        parts: ranks that send a part each: 1 where it travels whole.
        gathered_at: byte at which the whole begins in the memory for what is gathered.
    """

    field: Field
    offset: int
    nbytes: int
    parts: int
    gathered_at: int

    def bytes_of(self, message: Tensor) -> Tensor:
        """What travels, where it lies in a message: uint8 [nbytes]."""
        return message[self.offset : self.offset + self.nbytes]

    def gathered_bytes(self, wholes: Tensor) -> Tensor:
        """The whole of a sliced field, where it is gathered: uint8 [parts, nbytes]."""
        end = self.gathered_at + self.field.nbytes
        return wholes[self.gathered_at : end].view(self.parts, self.nbytes)

    def part(self, message: Tensor) -> Tensor:
        """What travels, where it lies in a message: the tensor, or its slice [elements]."""
        typed = self.bytes_of(message).view(self.field.dtype)
        return typed.view(self.field.shape) if self.parts == 1 else typed

    def laid(self, message: Tensor) -> Tensor:
        """The same, as a tensor of its own over the memory."""
        dtype = self.field.dtype
        shape = self.field.shape if self.parts == 1 else (self.nbytes // dtype.itemsize,)
        return laid(message, self.offset, shape, dtype)

    def gathered(self, wholes: Tensor) -> Tensor:
        """The whole of a sliced field, where it lies in the memory for what is gathered."""
        end = self.gathered_at + self.field.nbytes
        return wholes[self.gathered_at : end].view(self.field.dtype).view(self.field.shape)


@dataclass(frozen=True)
class Layout:
    """A message: the header, then every field's part.

    Attributes:
        shape_class: what travels.
        places: its fields, in their order.
        nbytes: of the message, header included.
        gathered_nbytes: of the memory for what is gathered: the headers of all slices' messages,
            then the wholes of sliced fields; 0 where there are none.
    """

    shape_class: ShapeClass
    places: tuple[Place, ...]
    nbytes: int
    gathered_nbytes: int

    @property
    def sliced(self) -> tuple[Place, ...]:
        """Fields of which only a slice travels."""
        return tuple(place for place in self.places if place.parts > 1)


def layout_of(shape_class: ShapeClass, parts: int = 1) -> Layout:
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
        places.append(Place(field, end, nbytes, slices, wholes))
        end = _aligned(end + nbytes)
        wholes += _aligned(field.nbytes) if slices > 1 else 0
    sliced = any(place.parts > 1 for place in places)
    return Layout(shape_class, tuple(places), end, wholes if sliced else 0)


def laid(memory: Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor over uint8 [n], from byte `at` on: one reference to the memory, where a
    slice that is viewed as another type, and then as another shape, is two. Any thread may write to
    it, in inference mode or not."""
    first = (memory.storage_offset() + at) // dtype.itemsize
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    with torch.inference_mode(False):
        made = torch.empty(0, dtype=dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), first, shape, strides)


def _divides(parts: int, field: Field) -> bool:
    elements = field.nbytes // field.dtype.itemsize
    return field.split is Split.SLICED and elements % parts == 0


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
