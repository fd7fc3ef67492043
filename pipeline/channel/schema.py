"""What travels over an edge in one step: names, shapes, dtypes, and what is sliced.

Everything that one stage hands to the next in a step is of one *shape class*. A class is known to
both ends before the first of its messages, so that a message is its tensors' bytes and a header of
fixed size: no metadata, nothing to unpickle. Classes are compared by digest.

What every step of an edge looks like, but for how many rows it has.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor

from equipoise.hal.errors import ShapeClassError

Constant = str | int | float | bool | None
"""What may stand beside tensors: part of the class, so another value is another class."""


class SliceMode(StrEnum):
    """How much of a tensor travels over the edge of one rank."""

    WHOLE = "whole"
    SLICED = "sliced"
    """The tensor is the same on every rank of the sending group (tensor parallelism), each of which
    sends one slice of it; the receivers gather."""


@dataclass(frozen=True)
class TensorField:
    """One tensor of a class.

    Attributes:
        name: its key.
        shape: of the whole tensor.
        dtype: any whose elements are bytes.
        slice_mode: how much of it travels.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slice_mode: SliceMode = SliceMode.WHOLE

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class MessageSchema:
    """The tensors of one step over one edge, in the order in which they are packed.

    Attributes:
        fields: the tensors; each name once.
        constants: what stands beside them, by name; both ends know it, and nothing of it travels.
    """

    fields: tuple[TensorField, ...]
    constants: tuple[tuple[str, Constant], ...] = ()

    def __post_init__(self) -> None:
        names = [one.name for one in self.fields] + [name for name, _ in self.constants]
        if len(set(names)) != len(names):
            raise ShapeClassError(f"a name stands more than once in {sorted(names)}")
        for one in self.fields:
            if min(one.shape, default=0) < 0:
                raise ShapeClassError(f"{one.name} cannot have shape {one.shape}")

    @cached_property
    def digest(self) -> int:
        """A number below 2**63 that stands for the class in headers (blake2b of its text)."""
        return int.from_bytes(blake2b(self.to_bytes(), digest_size=8).digest(), "big") >> 1

    def to_bytes(self) -> bytes:
        """As text (JSON), the same on every machine."""
        fields = [
            [f.name, list(f.shape), str(f.dtype).removeprefix("torch."), f.slice_mode]
            for f in self.fields
        ]
        text = {"fields": fields, "constants": [list(pair) for pair in self.constants]}
        return json.dumps(text, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> "MessageSchema":
        """From `to_bytes`. Raises `ShapeClassError` where that is not what it is."""
        try:
            read = json.loads(text)
            fields = tuple(
                TensorField(name, tuple(shape), _dtype(dtype), SliceMode(split))
                for name, shape, dtype, split in read["fields"]
            )
            return cls(fields, tuple((name, value) for name, value in read["constants"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ShapeClassError(f"not a description of a shape class: {error}") from error

    def __str__(self) -> str:
        tensors = ", ".join(f"{f.name} {list(f.shape)} {f.dtype}" for f in self.fields)
        beside = ", ".join(f"{name}={value!r}" for name, value in self.constants)
        return " and ".join(part for part in (tensors, beside) if part) or "nothing"


def same_constant(one: object, other: Constant) -> bool:
    """Whether two constants make the same class: 1 and True do not, and a NaN and itself do."""
    return isinstance(one, type(other)) and json.dumps(one) == json.dumps(other)


def schema_of(
    tensors: Mapping[str, Tensor | Constant], sliced: Collection[str] = ()
) -> MessageSchema:
    """The class of what is to be handed over.

    Args:
        tensors: by name; what is no tensor is a constant.
        sliced: names of tensors of which every rank of the sending group sends a slice.

    Raises:
        ShapeClassError: something is neither a tensor nor a constant, or a name is not there.
    """
    fields, constants = [], []
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            split = SliceMode.SLICED if name in sliced else SliceMode.WHOLE
            fields.append(TensorField(name, tuple(value.shape), value.dtype, split))
        elif value is None or isinstance(value, str | int | float):
            constants.append((name, value))
        else:
            raise ShapeClassError(
                f"{name} is a {type(value).__name__}: neither tensor nor constant"
            )
    if strange := set(sliced) - {field.name for field in fields}:
        raise ShapeClassError(f"{sorted(strange)} cannot be sliced: no such tensor")
    return MessageSchema(tuple(fields), tuple(constants))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ShapeClassError(f"no dtype is called {name!r}")
    return found


@dataclass(frozen=True)
class RowField:
    """A tensor of the template.

    Attributes:
        name: its key.
        row_shape: its shape behind the rows.
        dtype: any whose elements are bytes.
        slice_mode: how much of it travels.
    """

    name: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    slice_mode: SliceMode = SliceMode.WHOLE


@dataclass(frozen=True)
class SchemaTemplate:
    """The tensors of an edge, each [rows, *tail]; a class for every number of rows.

    Attributes:
        fields: in the order in which they are packed.
        max_rows: rows of the largest step.
    """

    fields: tuple[RowField, ...]
    max_rows: int
    _classes: dict[int, MessageSchema] = field(default_factory=dict, compare=False, repr=False)

    def schema_for(self, rows: int) -> MessageSchema:
        """The class of a step of so many rows.

        Raises:
            ShapeClassError: more rows than the largest step has, or fewer than none.
        """
        if not 0 <= rows <= self.max_rows:
            raise ShapeClassError(f"a step of {rows} rows: 0 to {self.max_rows} were announced")
        if rows not in self._classes:
            fields = (
                TensorField(f.name, (rows, *f.row_shape), f.dtype, f.slice_mode)
                for f in self.fields
            )
            self._classes[rows] = MessageSchema(tuple(fields))
        return self._classes[rows]

    @property
    def sliced_names(self) -> tuple[str, ...]:
        """Names of the tensors that travel in slices."""
        return tuple(f.name for f in self.fields if f.slice_mode is SliceMode.SLICED)

    def to_json(self) -> str:
        """As text, the same on every machine; for both ends to compare."""
        fields = [[f.name, list(f.row_shape), str(f.dtype), f.slice_mode] for f in self.fields]
        return json.dumps({"fields": fields, "most": self.max_rows}, separators=(",", ":"))
