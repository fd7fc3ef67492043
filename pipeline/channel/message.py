"""The format of a message: a header of 64 bytes, then the tensors of its schema.

The header says which message it is and has a checksum. `message_layout` says where each tensor of
a schema lies, `LayoutCache` remembers the layouts in use, `pack` and `unpack` copy tensors into a
message and make views of one that was received.
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
from equipoise.pipeline.channel.schema import MessageSchema, SliceMode, TensorField

HEADER_WORDS = 8
HEADER_BYTES = 8 * HEADER_WORDS
_MAGIC = 0x4571_7569_706F_6973
"""First word of every header: the ASCII bytes of "Equipois"."""
_HEADER_STRUCT = struct.Struct(f"={HEADER_WORDS}q")


@dataclass(frozen=True)
class Header:
    """Identifies one message.

    Attributes:
        sequence: number of messages that this edge carried before it.
        schema_digest: digest of its schema.
        nbytes: size of the message: header and payload.
    """

    sequence: int
    schema_digest: int
    nbytes: int

    def write(self, words: memoryview) -> None:
        """Write the header into `words`, the buffer of an int64 [1, 8] in host memory."""
        fields = _MAGIC, self.sequence, self.schema_digest, self.nbytes
        _HEADER_STRUCT.pack_into(words, 0, *fields, 0, 0, 0, _xor_words(fields))


def read_header(words: Sequence[int], edge: str) -> Header:
    """Parse the eight words of a header.

    Raises:
        MessageMismatch: the words are not those of a header, or are damaged.
    """
    *fields, checksum = words
    if fields[0] != _MAGIC or any(fields[4:]) or _xor_words(fields) != checksum:
        raise MessageMismatch(f"{edge}: what arrived does not begin as a message does")
    return Header(*fields[1:4])


def _xor_words(fields: Sequence[int]) -> int:
    folded = 0
    for field in fields:
        folded ^= field
    return folded


ALIGNMENT = 64
"""Every tensor begins at a multiple of 64 bytes, so that views of any dtype are possible."""


@dataclass(frozen=True)
class FieldLayout:
    """Where one tensor lies in a message.

    Attributes:
        field: the tensor.
        offset: byte at which what is sent of it begins.
        nbytes: size of what is sent of it.
        num_slices: ranks that send a slice each; 1 if the tensor travels whole.
        gathered_offset: byte at which the whole tensor begins in the buffer for gathered slices.
    """

    field: TensorField
    offset: int
    nbytes: int
    num_slices: int
    gathered_offset: int

    def sent_bytes(self, message: Tensor) -> Tensor:
        """The bytes of `message` that hold what is sent: uint8 [nbytes]."""
        return message[self.offset : self.offset + self.nbytes]

    def gathered_bytes(self, gathered: Tensor) -> Tensor:
        """The bytes that the slices are gathered into: uint8 [num_slices, nbytes]."""
        end = self.gathered_offset + self.field.nbytes
        return gathered[self.gathered_offset : end].view(self.num_slices, self.nbytes)

    def sent_tensor(self, message: Tensor) -> Tensor:
        """The same as a tensor of its own over the memory, not a view (see `typed_view`)."""
        dtype = self.field.dtype
        shape = self.field.shape if self.num_slices == 1 else (self.nbytes // dtype.itemsize,)
        return typed_view(message, self.offset, shape, dtype)

    def received_view(self, message: Tensor, gathered: Tensor, rows: int | None = None) -> Tensor:
        """A view of the whole tensor, where it is received or gathered.

        Args:
            message: uint8, the buffer of the message.
            gathered: uint8, the buffer for gathered slices.
            rows: size of the first dimension, if not that of the field; the view goes on in the
                buffer behind the tensor.
        """
        memory, begin = (
            (message, self.offset) if self.num_slices == 1 else (gathered, self.gathered_offset)
        )
        shape, dtype = self.field.shape, self.field.dtype
        if rows is not None:
            shape = (rows, *shape[1:])
        return memory[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)


@dataclass(frozen=True)
class MessageLayout:
    """The layout of a message: the header, then the tensors in the order of the schema.

    Attributes:
        schema: of the message.
        fields: where each tensor lies, in the order of the schema.
        nbytes: size of the message, header included.
        gathered_nbytes: size of the buffer for gathered slices: the headers of all slices'
            messages, then the sliced tensors; 0 if no tensor is sliced.
    """

    schema: MessageSchema
    fields: tuple[FieldLayout, ...]
    nbytes: int
    gathered_nbytes: int

    @property
    def sliced_fields(self) -> tuple[FieldLayout, ...]:
        """The tensors of which only a slice travels."""
        return tuple(field for field in self.fields if field.num_slices > 1)


def message_layout(schema: MessageSchema, num_slices: int = 1) -> MessageLayout:
    """Return the layout of a schema's message.

    Args:
        schema: of the message.
        num_slices: ranks of the sending group. A tensor that is declared sliced travels whole if
            its elements cannot be divided evenly among them.
    """
    layouts, end, gathered_end = [], HEADER_BYTES, HEADER_BYTES * num_slices
    for field in schema.fields:
        field_slices = num_slices if _divides(num_slices, field) else 1
        nbytes = field.nbytes // field_slices
        layouts.append(FieldLayout(field, end, nbytes, field_slices, gathered_end))
        end = _aligned(end + nbytes)
        gathered_end += _aligned(field.nbytes) if field_slices > 1 else 0
    sliced = any(layout.num_slices > 1 for layout in layouts)
    return MessageLayout(schema, tuple(layouts), end, gathered_end if sliced else 0)


def typed_view(memory: Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor over `memory`, uint8 [n], from byte `at` on.

    It is one reference to the storage, which `TrackedBuffer` counts; a slice that is viewed as
    another dtype and then as another shape would be two. Any thread may write to it, in inference
    mode or not.
    """
    first = (memory.storage_offset() + at) // dtype.itemsize
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    with torch.inference_mode(False):
        view = torch.empty(0, dtype=dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), first, shape, strides)


def _divides(num_slices: int, field: TensorField) -> bool:
    elements = field.nbytes // field.dtype.itemsize
    return field.slice_mode is SliceMode.SLICED and elements % num_slices == 0


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


MAX_CACHED_LAYOUTS = 1024
"""Layouts that a cache keeps; the least recently used is dropped. Steps have many sizes."""


class LayoutCache:
    """Layouts by the digest of their schema: making one costs more than sending a few rows.

    Args:
        num_slices: slices that a sliced tensor is cut into.
    """

    def __init__(self, num_slices: int) -> None:
        self._num_slices = num_slices
        self._layouts: OrderedDict[int, MessageLayout] = OrderedDict()

    def lookup(self, schema: MessageSchema) -> MessageLayout:
        """Return the layout of `schema`."""
        layout = self._layouts.get(schema.digest)
        if layout is None:
            layout = self._layouts[schema.digest] = message_layout(schema, self._num_slices)
        self._layouts.move_to_end(schema.digest)
        if len(self._layouts) > MAX_CACHED_LAYOUTS:
            self._layouts.popitem(last=False)
        return layout


Tensors = Mapping[str, Tensor]


def check_matches_schema(edge: Edge, schema: MessageSchema, tensors: Tensors) -> None:
    """Raise `ShapeClassError` unless `tensors` match `schema` and lie on the edge's device."""
    device = edge.accelerator.device
    if len(tensors) != len(schema.fields):
        raise ShapeClassError(f"{edge.name}: got {sorted(tensors)}, it carries {schema}")
    for field in schema.fields:
        value: object = tensors.get(field.name)
        if not isinstance(value, Tensor) or not _matches(value, field):
            actual = _describe(value)
            raise ShapeClassError(f"{edge.name}: {field.name} is {actual}, it carries {schema}")
        if value.device != device:
            raise ShapeClassError(f"{edge.name}: {field.name} is on {value.device}, not {device}")


def check_in_place(edge: Edge, layout: MessageLayout, tensors: Tensors, message: Tensor) -> None:
    """Raise `ShapeClassError` if a tensor lies in the message buffer, but not where it belongs."""
    storage, begin = message.untyped_storage().data_ptr(), message.data_ptr()
    for field in layout.fields:
        value = tensors[field.field.name]
        if not value.numel() or value.untyped_storage().data_ptr() != storage:
            continue
        in_place = value.data_ptr() == begin + field.offset and value.is_contiguous()
        if field.num_slices > 1 or not in_place:
            name = field.field.name
            raise ShapeClassError(f"{edge.name}: {name} lies in the buffer, but not in its place")


def pack(edge: Edge, layout: MessageLayout, tensors: Tensors, views: Sequence[Tensor]) -> None:
    """Copy tensors into the message on the current stream; those that lie there already stay.

    Args:
        edge: says which slice is this rank's.
        layout: of the message.
        tensors: by name, of the layout's schema.
        views: the destination of each tensor in the message, in the order of the layout.
    """
    for field, view in zip(layout.fields, views, strict=True):
        value = tensors[field.field.name]
        if value.data_ptr() != view.data_ptr():
            view.copy_(_own_slice(edge, field, value))


def unpack(
    layout: MessageLayout, message: Tensor, gathered: Tensor, rows: int | None = None
) -> dict[str, Tensor]:
    """Return views of a message's tensors by name; their content may still be on its way.

    `rows` is as in `FieldLayout.received_view`.
    """
    return {
        field.field.name: field.received_view(message, gathered, rows) for field in layout.fields
    }


def header_views(memory: Tensor, count: int) -> Tensor:
    """The first `count` headers in `memory`, uint8 [n], as int64 [count, 8]."""
    return memory[: count * HEADER_BYTES].view(torch.int64).view(count, HEADER_WORDS)


def _own_slice(edge: Edge, field: FieldLayout, tensor: Tensor) -> Tensor:
    if field.num_slices == 1 or edge.slice_group is None:
        return tensor
    return tensor.reshape(field.num_slices, -1)[edge.slice_group.rank]


def _matches(tensor: Tensor, field: TensorField) -> bool:
    return tensor.dtype == field.dtype and tuple(tensor.shape) == field.shape


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    return "missing" if value is None else repr(value)
