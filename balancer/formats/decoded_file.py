"""A bundle: named fields out of one file, whatever the file is written in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats import numbers
from equipoise.balancer.formats.encodings import (
    decode_json,
    decode_npy,
    decode_npz,
    decode_safetensors,
    decode_torch,
    decode_yaml,
    encode_json,
    encode_npz,
    encode_safetensors,
)
from equipoise.balancer.formats.files import read_bytes
from equipoise.balancer.formats.statistics_csv import decode_csv
from equipoise.hal.errors import FormatError, PlacementError

UNNAMED_ARRAY = "array"
"""The field of a file that holds one array without a name."""
Decoder = Callable[[Path, bytes], Mapping[str, object]]
DECODERS: dict[str, Decoder] = {
    ".json": decode_json,
    ".npz": decode_npz,
    ".npy": lambda path, data: {UNNAMED_ARRAY: decode_npy(path, data)},
    ".safetensors": decode_safetensors,
    ".pt": decode_torch,
    ".pth": decode_torch,
    ".yaml": decode_yaml,
    ".yml": decode_yaml,
    ".csv": decode_csv,
}
MAGIC_PREFIXES = ((b"\x93NUMPY", ".npy"), (b"PK", ".npz"), (b"{", ".json"), (b"layer,", ".csv"))
"""How a file begins whose suffix says nothing."""


@dataclass(frozen=True)
class DecodedFile:
    """Fields by name: arrays, or what JSON and YAML have.

    Attributes:
        path: the file.
        suffix: what it was read as.
        fields: by name.
    """

    path: Path
    suffix: str
    fields: Mapping[str, object]

    def error(self, what: str) -> FormatError:
        """An error that names the file."""
        return FormatError(str(self.path), what)

    def int64_array(self, name: str, axes: tuple[str, ...]) -> npt.NDArray[np.int64]:
        """A field as an array with these axes. Raises `FormatError`."""
        try:
            return numbers.int64_array(name, self._field(name), axes)
        except PlacementError as error:
            raise self.error(str(error)) from None

    def int32_array(self, name: str, axes: tuple[str, ...]) -> npt.NDArray[np.int32]:
        """The same in 32 bits."""
        try:
            return numbers.int32_array(name, self.int64_array(name, axes), axes)
        except PlacementError as error:
            raise self.error(str(error)) from None

    def integer(self, name: str) -> int:
        """A field that is one whole number. Raises `FormatError`."""
        try:
            return numbers.parse_integer(name, self._field(name))
        except PlacementError as error:
            raise self.error(str(error)) from None

    def optional_integer(self, name: str) -> int | None:
        """The same, or None where there is no such field, or it holds nothing."""
        return None if self.fields.get(name) is None else self.integer(name)

    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of the layers, where the file tells them; else none."""
        if "layers" not in self.fields:
            return ()
        return tuple(self.int64_array("layers", ("layer",)).tolist())

    def _field(self, name: str) -> object:
        if name not in self.fields:
            known = ", ".join(sorted(self.fields)[:8])
            raise self.error(f"has no field {name}, only {numbers.short_repr(known)}")
        return self.fields[name]


def decode_file(path: Path) -> DecodedFile:
    """Read a file by its suffix, or by how it begins. Raises `FormatError`."""
    data = read_bytes(path)
    if not data:
        raise FormatError(str(path), "is empty")
    suffix = path.suffix.lower()
    if suffix not in DECODERS:
        found = [known for magic, known in MAGIC_PREFIXES if data.lstrip().startswith(magic)]
        if not found:
            known = ", ".join(DECODERS)
            raise FormatError(str(path), f"is of no kind that is known: {known}")
        suffix = found[0]
    return DecodedFile(path, suffix, DECODERS[suffix](path, data))


def encode_fields(suffix: str, fields: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Arrays by name as a file of JSON, npz or safetensors."""
    if suffix == ".npz":
        return encode_npz(dict(fields))
    if suffix == ".safetensors":
        return encode_safetensors(fields)
    return encode_json({name: array.tolist() for name, array in fields.items()})
