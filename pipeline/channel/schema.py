"""Message schemas: names, shapes, dtypes and slicing of the tensors that one message carries.

A message is the bytes of its tensors and a header of fixed size with the digest of its schema:
nothing to unpickle. The schema itself travels once, as JSON after the payload of the first message
that uses it, unless the receiver was told before (`framing.py`). A `SchemaTemplate` is a schema in
which only the number of rows varies.
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
"""A value that goes with the tensors; it is part of the schema."""


class SliceMode(StrEnum):
    """How much of a tensor travels over the edge of one rank."""

    WHOLE = "whole"
    SLICED = "sliced"
    """The tensor is the same on every rank of the sending group (tensor parallelism). Each rank
    sends one slice of it, and the receivers gather them."""


@dataclass(frozen=True)
class TensorField:
    """One tensor of a schema.

    Attributes:
        name: its key.
        shape: of the whole tensor.
        dtype: any whose elements have whole bytes.
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
    """The tensors of one message, in the order in which they are packed.

    Attributes:
        fields: the tensors; each name once.
        constants: values that go with the tensors, by name. Both ends know them; they do not
            travel.
    """

    fields: tuple[TensorField, ...]
    constants: tuple[tuple[str, Constant], ...] = ()

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.fields] + [name for name, _ in self.constants]
        if len(set(names)) != len(names):
            raise ShapeClassError(f"a name occurs more than once in {sorted(names)}")
        for tensor in self.fields:
            if min(tensor.shape, default=0) < 0:
                raise ShapeClassError(f"{tensor.name} cannot have shape {tensor.shape}")

    @cached_property
    def digest(self) -> int:
        """Identifies the schema in headers: blake2b of `to_bytes()`, below 2**63 as int64."""
        return int.from_bytes(blake2b(self.to_bytes(), digest_size=8).digest(), "big") >> 1

    def to_bytes(self) -> bytes:
        """The schema as JSON; equal schemas give equal bytes on every machine."""
        fields = [
            [f.name, list(f.shape), str(f.dtype).removeprefix("torch."), f.slice_mode]
            for f in self.fields
        ]
        text = {"fields": fields, "constants": [list(pair) for pair in self.constants]}
        return json.dumps(text, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> "MessageSchema":
        """Parse what `to_bytes` wrote. Raises `ShapeClassError` for anything else."""
        try:
            description = json.loads(text)
            fields = tuple(
                TensorField(name, tuple(shape), _dtype(dtype), SliceMode(slice_mode))
                for name, shape, dtype, slice_mode in description["fields"]
            )
            return cls(fields, tuple((name, value) for name, value in description["constants"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ShapeClassError(f"not a description of a schema: {error}") from error

    def __str__(self) -> str:
        tensors = ", ".join(f"{f.name} {list(f.shape)} {f.dtype}" for f in self.fields)
        constants = ", ".join(f"{name}={value!r}" for name, value in self.constants)
        return " and ".join(part for part in (tensors, constants) if part) or "nothing"


def same_constant(a: object, b: Constant) -> bool:
    """Whether two constants give the same schema: 1 and True do not, and NaN and NaN do."""
    return isinstance(a, type(b)) and json.dumps(a) == json.dumps(b)


def schema_of(
    tensors: Mapping[str, Tensor | Constant], sliced: Collection[str] = ()
) -> MessageSchema:
    """Return the schema of `tensors`.

    Args:
        tensors: by name; a value that is not a tensor is a constant.
        sliced: names of tensors of which every rank of the sending group sends a slice.

    Raises:
        ShapeClassError: a value is neither tensor nor constant, or a name in `sliced` is unknown.
    """
    fields, constants = [], []
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            slice_mode = SliceMode.SLICED if name in sliced else SliceMode.WHOLE
            fields.append(TensorField(name, tuple(value.shape), value.dtype, slice_mode))
        elif value is None or isinstance(value, str | int | float):
            constants.append((name, value))
        else:
            raise ShapeClassError(
                f"{name} is a {type(value).__name__}: neither tensor nor constant"
            )
    if unknown := set(sliced) - {field.name for field in fields}:
        raise ShapeClassError(f"{sorted(unknown)} cannot be sliced: no such tensor")
    return MessageSchema(tuple(fields), tuple(constants))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ShapeClassError(f"no dtype is called {name!r}")
    return dtype


@dataclass(frozen=True)
class RowField:
    """One tensor of a template.

    Attributes:
        name: its key.
        row_shape: its shape without the first dimension, the rows.
        dtype: any whose elements have whole bytes.
        slice_mode: how much of it travels.
    """

    name: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    slice_mode: SliceMode = SliceMode.WHOLE


@dataclass(frozen=True)
class SchemaTemplate:
    """The tensors of an edge, each [rows, *row_shape]; one schema for each number of rows.

    Attributes:
        fields: in the order in which they are packed.
        max_rows: rows of the largest step.
    """

    fields: tuple[RowField, ...]
    max_rows: int
    _schemas: dict[int, MessageSchema] = field(default_factory=dict, compare=False, repr=False)

    def schema_for(self, rows: int) -> MessageSchema:
        """Return the schema of a step with `rows` rows.

        Raises:
            ShapeClassError: `rows` is negative or above `max_rows`.
        """
        if not 0 <= rows <= self.max_rows:
            raise ShapeClassError(f"a step of {rows} rows: 0 to {self.max_rows} were announced")
        if rows not in self._schemas:
            fields = (
                TensorField(f.name, (rows, *f.row_shape), f.dtype, f.slice_mode)
                for f in self.fields
            )
            self._schemas[rows] = MessageSchema(tuple(fields))
        return self._schemas[rows]

    @property
    def sliced_names(self) -> tuple[str, ...]:
        """Names of the tensors that travel in slices."""
        return tuple(f.name for f in self.fields if f.slice_mode is SliceMode.SLICED)

    def to_json(self) -> str:
        """The template as JSON, which both ends compare when they open the edge."""
        fields = [[f.name, list(f.row_shape), str(f.dtype), f.slice_mode] for f in self.fields]
        return json.dumps({"fields": fields, "max_rows": self.max_rows}, separators=(",", ":"))
