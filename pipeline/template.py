"""What every step of an edge looks like, but for how many rows it has."""

import json
from dataclasses import dataclass, field

import torch

from equipoise.hal.errors import ShapeClassError
from equipoise.pipeline.shape_class import Field, ShapeClass, Split


@dataclass(frozen=True)
class RowField:
    """A tensor of the template.

    Attributes:
        name: its key.
        tail: its shape behind the rows.
        dtype: any whose elements are bytes.
        split: how much of it travels.
    """

    name: str
    tail: tuple[int, ...]
    dtype: torch.dtype
    split: Split = Split.WHOLE


@dataclass(frozen=True)
class Template:
    """The tensors of an edge, each [rows, *tail]; a class for every number of rows.

    Attributes:
        fields: in the order in which they are packed.
        most: rows of the largest step.
    """

    fields: tuple[RowField, ...]
    most: int
    _classes: dict[int, ShapeClass] = field(default_factory=dict, compare=False, repr=False)

    def at(self, rows: int) -> ShapeClass:
        """The class of a step of so many rows.

        Raises:
            ShapeClassError: more rows than the largest step has, or fewer than none.
        """
        if not 0 <= rows <= self.most:
            raise ShapeClassError(f"a step of {rows} rows: 0 to {self.most} were announced")
        if rows not in self._classes:
            fields = (Field(f.name, (rows, *f.tail), f.dtype, f.split) for f in self.fields)
            self._classes[rows] = ShapeClass(tuple(fields))
        return self._classes[rows]

    @property
    def sliced(self) -> tuple[str, ...]:
        """Names of the tensors that travel in slices."""
        return tuple(f.name for f in self.fields if f.split is Split.SLICED)

    def to_json(self) -> str:
        """As text, the same on every machine; for both ends to compare."""
        fields = [[f.name, list(f.tail), str(f.dtype), f.split] for f in self.fields]
        return json.dumps({"fields": fields, "most": self.most}, separators=(",", ":"))
