"""Tensors into a message, and out of it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from equipoise.hal.errors import ShapeClassError
from equipoise.pipeline.edge import Edge
from equipoise.pipeline.header import HEADER_BYTES, WORDS
from equipoise.pipeline.layout import Layout, Place
from equipoise.pipeline.shape_class import Constant, Field, ShapeClass, same_constant

Tensors = Mapping[str, Tensor | Constant]


def check_fits(edge: Edge, shape_class: ShapeClass, tensors: Tensors) -> None:
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


def check_in_place(edge: Edge, layout: Layout, tensors: Tensors, message: Tensor) -> None:
    """Raise `ShapeClassError` where a tensor lies in the message, but not in its place."""
    ring, begin = message.untyped_storage().data_ptr(), message.data_ptr()
    for place in layout.places:
        value = tensors[place.field.name]
        assert isinstance(value, Tensor)  # a field of the layout
        if not value.numel() or value.untyped_storage().data_ptr() != ring:
            continue
        in_place = value.data_ptr() == begin + place.offset and value.is_contiguous()
        if place.parts > 1 or not in_place:
            name = place.field.name
            raise ShapeClassError(f"{edge.name}: {name} lies in the buffer, but not in its place")


def pack(edge: Edge, layout: Layout, tensors: Tensors, parts: Sequence[Tensor]) -> None:
    """Every field's part into its place, in the order of the current stream, unless it is there.

    Args:
        edge: says which slice is this rank's.
        layout: of the message.
        tensors: by name, of the layout's class.
        parts: the fields' places in the message, in the order of the layout.
    """
    for place, part in zip(layout.places, parts, strict=True):
        value = tensors[place.field.name]
        assert isinstance(value, Tensor)  # a field of the layout
        if value.data_ptr() != part.data_ptr():
            part.copy_(_part(edge, place, value))


def unpack(layout: Layout, message: Tensor, wholes: Tensor) -> dict[str, Tensor]:
    """The tensors of a message by name, where they lie or will lie."""
    return {
        place.field.name: place.part(message) if place.parts == 1 else place.gathered(wholes)
        for place in layout.places
    }


def bytes_tensor(text: bytes) -> Tensor:
    """uint8 [n], in the host's memory."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def heads(memory: Tensor, count: int) -> Tensor:
    """So many headers, one behind the other from the beginning of uint8 [n]: int64 [count, 8]."""
    return memory[: count * HEADER_BYTES].view(torch.int64).view(count, WORDS)


def _part(edge: Edge, place: Place, tensor: Tensor) -> Tensor:
    if place.parts == 1 or edge.slices is None:
        return tensor
    return tensor.reshape(place.parts, -1)[edge.slices.part]


def _fits(tensor: Tensor, field: Field) -> bool:
    return tensor.dtype == field.dtype and tuple(tensor.shape) == field.shape


def _described(found: Tensor | Constant) -> str:
    if isinstance(found, Tensor):
        return f"{list(found.shape)} {found.dtype}"
    return "missing" if found is None else repr(found)
