"""Message schemas: names, shapes, dtypes and slicing of the tensors that one message carries.

Both ends know the schema of a message beforehand, so none travels: a message is the bytes of its
tensors and a header of fixed size with the schema's digest, and there is nothing to unpickle. A
`SchemaTemplate` is a schema in which only the number of rows varies.
"""

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from math import prod

import torch

from equipoise.hal.errors import ShapeClassError


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
    """

    fields: tuple[TensorField, ...]

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.fields]
        if len(set(names)) != len(names):
            raise ShapeClassError(f"a name occurs more than once in {sorted(names)}")
        for tensor in self.fields:
            if min(tensor.shape, default=0) < 0:
                raise ShapeClassError(f"{tensor.name} cannot have shape {tensor.shape}")

    @cached_property
    def digest(self) -> int:
        """Identifies the schema in headers: blake2b of its JSON, below 2**63 as int64; equal
        schemas have equal digests on every machine."""
        fields = [[f.name, list(f.shape), str(f.dtype), f.slice_mode] for f in self.fields]
        text = json.dumps(fields, separators=(",", ":")).encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1

    @cached_property
    def without_rows(self) -> tuple[TensorField, ...]:
        """The fields with their first dimension left out; the same for steps of any size."""
        return tuple(replace(field, shape=field.shape[1:]) for field in self.fields)

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {list(f.shape)} {f.dtype}" for f in self.fields) or "nothing"


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

    @classmethod
    def from_json(cls, text: str) -> "SchemaTemplate":
        """Parse what `to_json` wrote. Raises `ShapeClassError` for anything else."""
        try:
            content = json.loads(text)
            fields = tuple(
                RowField(name, tuple(row_shape), _dtype(dtype), SliceMode(slice_mode))
                for name, row_shape, dtype, slice_mode in content["fields"]
            )
            return cls(fields, int(content["max_rows"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ShapeClassError(f"not a template of tensors: {error}") from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return dtype
