"""What a message is: its class, its layout, its header, and the memory that it lies in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.errors import MessageMismatch, ShapeClassError
from equipoise.pipeline.channel.buffers import TrackedBuffer
from equipoise.pipeline.channel.message import (
    ALIGNMENT,
    HEADER_BYTES,
    HEADER_WORDS,
    Header,
    message_layout,
    read_header,
    unpack,
)
from equipoise.pipeline.channel.schema import (
    MessageSchema,
    RowField,
    SchemaTemplate,
    SliceMode,
    TensorField,
    schema_of,
)

DTYPES = [
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float64,
]
FIELDS = st.builds(
    TensorField,
    st.text(max_size=4),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from(SliceMode),
)
CONSTANTS = st.lists(
    st.tuples(st.text("xyz", min_size=5, max_size=6), st.none() | st.integers() | st.text()),
    max_size=2,
    unique_by=lambda pair: pair[0],
)
CLASSES = st.builds(
    MessageSchema,
    st.lists(FIELDS, max_size=4, unique_by=lambda field: field.name).map(tuple),
    CONSTANTS.map(tuple),
)
NUMBERS = st.integers(0, 2**62)


@given(CLASSES)
def test_shape_class_survives_serialisation(one: MessageSchema) -> None:
    assert MessageSchema.from_bytes(one.to_bytes()) == one
    assert 0 <= one.digest < 2**63


@given(CLASSES, CLASSES)
def test_shape_class_digest_identifies_class(one: MessageSchema, other: MessageSchema) -> None:
    assert (one.digest == other.digest) == (one == other)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"fields": [["a", [1], "complex7", "whole"]], "constants": []}',
        b'{"fields": [["a", [1], "float32", "halved"]], "constants": []}',
        b'{"fields": [["a", [-1], "float32", "whole"]], "constants": []}',
        b'{"fields": [["a", [1], "nn", "whole"]], "constants": []}',
    ],
)
def test_shape_class_refuses_invalid_description(text: bytes) -> None:
    with pytest.raises(ShapeClassError):
        MessageSchema.from_bytes(text)


def test_shape_class_accepts_only_tensors_and_constants() -> None:
    schema = schema_of({"a": torch.zeros(2, 3), "n": 3, "b": torch.zeros(())}, sliced=("a",))
    assert schema.fields == (
        TensorField("a", (2, 3), torch.float32, SliceMode.SLICED),
        TensorField("b", (), torch.float32),
    )
    assert schema.constants == (("n", 3),)
    with pytest.raises(ShapeClassError, match="neither tensor nor constant"):
        schema_of({"a": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(ShapeClassError, match="cannot be sliced"):
        schema_of({"a": torch.zeros(1)}, sliced=("b",))
    with pytest.raises(ShapeClassError, match="more than once"):
        MessageSchema((TensorField("a", (1,), torch.uint8), TensorField("a", (2,), torch.uint8)))


@given(CLASSES, st.integers(1, 4))
def test_message_layout_keeps_parts_apart_aligned_and_inside(
    one: MessageSchema, parts: int
) -> None:
    layout = message_layout(one, parts)
    end = HEADER_BYTES
    for place in layout.fields:
        assert place.offset >= end
        assert place.offset % ALIGNMENT == 0
        assert place.nbytes * place.num_slices == place.field.nbytes
        assert place.num_slices in (1, parts)
        end = place.offset + place.nbytes
    assert end <= layout.nbytes


@given(CLASSES, st.integers(2, 3))
def test_message_layout_keeps_gathered_tensors_apart(one: MessageSchema, parts: int) -> None:
    layout = message_layout(one, parts)
    end = HEADER_BYTES * parts
    for place in layout.sliced_fields:
        assert place.gathered_offset >= end
        assert place.gathered_offset % ALIGNMENT == 0
        end = place.gathered_offset + place.field.nbytes
    assert layout.gathered_nbytes >= (end if layout.sliced_fields else 0)


@given(CLASSES)
def test_message_unpack_returns_packed_tensors(one: MessageSchema) -> None:
    layout = message_layout(one)
    message = torch.zeros(layout.nbytes, dtype=torch.uint8)
    values = {field.name: _values(field) for field in one.fields}
    for place in layout.fields:
        place.sent_view(message).copy_(values[place.field.name])
    for name, tensor in unpack(layout, message, message[:0]).items():
        assert tensor.shape == values[name].shape
        assert torch.equal(_bytes(tensor), _bytes(values[name]))


@given(st.builds(Header, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS))
def test_message_header_survives_round_trip(header: Header) -> None:
    words = torch.zeros(1, HEADER_WORDS, dtype=torch.int64)
    header.write(words.numpy().data)
    assert read_header(words[0].tolist(), "edge") == header


@given(st.builds(Header, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS), st.integers(0, 511))
def test_message_header_with_flipped_bit_is_refused(header: Header, bit: int) -> None:
    words = torch.zeros(1, HEADER_WORDS, dtype=torch.int64)
    header.write(words.numpy().data)
    words.view(torch.uint8)[0, bit // 8] ^= 1 << bit % 8
    with pytest.raises(MessageMismatch, match="edge"):
        read_header(words[0].tolist(), "edge")


def test_buffer_is_held_while_any_tensor_views_it() -> None:
    buffer = TrackedBuffer(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    buffer.reserve(64)
    assert not buffer.in_use
    view = buffer.memory[8:16].view(torch.float32)
    part = view[1:]
    assert buffer.in_use
    del view
    assert buffer.in_use
    del part
    assert not buffer.in_use
    closure = (lambda tensor: lambda: tensor)(buffer.memory[:4])
    assert buffer.in_use
    del closure
    assert not buffer.in_use


def test_buffer_reallocates_only_when_too_small() -> None:
    sizes: list[int] = []

    def memory(nbytes: int) -> Tensor:
        sizes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    buffer = TrackedBuffer(memory)
    for nbytes in (0, 8, 8, 3, 9):
        buffer.reserve(nbytes)
    assert sizes == [0, 8, 9]


def test_template_caches_one_shape_class_per_row_count() -> None:
    template = SchemaTemplate((RowField("a", (3,), torch.float32, SliceMode.SLICED),), max_rows=4)
    assert template.schema_for(2) is template.schema_for(2)
    assert template.schema_for(0).fields == (
        TensorField("a", (0, 3), torch.float32, SliceMode.SLICED),
    )
    assert template.sliced_names == ("a",)
    for rows in (-1, 5):
        with pytest.raises(ShapeClassError, match="0 to 4"):
            template.schema_for(rows)


def _values(field: TensorField) -> Tensor:
    count = field.nbytes
    numbers = (torch.arange(count) % 2).to(torch.uint8)
    return numbers.view(field.dtype).view(field.shape)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
