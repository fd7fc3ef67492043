"""Decodes a file of any supported encoding into named fields."""

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
"""Name of the field in a file that holds one array without a name."""
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
"""First bytes by which a file with an unknown suffix is recognised."""


@dataclass(frozen=True)
class DecodedFile:
    """The fields of a file by name: arrays, or the values of JSON and YAML.

    Attributes:
        path: the file.
        suffix: the encoding it was read as.
        fields: values by name.
    """

    path: Path
    suffix: str
    fields: Mapping[str, object]

    def error(self, what: str) -> FormatError:
        """Returns a `FormatError` that names the file."""
        return FormatError(str(self.path), what)

    def int64_array(self, name: str, axes: tuple[str, ...]) -> npt.NDArray[np.int64]:
        """Returns a field as an int64 array with these axes. Raises `FormatError`."""
        try:
            return numbers.int64_array(name, self._field(name), axes)
        except PlacementError as error:
            raise self.error(str(error)) from None

    def int32_array(self, name: str, axes: tuple[str, ...]) -> npt.NDArray[np.int32]:
        """Returns a field as an int32 array with these axes. Raises `FormatError`."""
        try:
            return numbers.int32_array(name, self.int64_array(name, axes), axes)
        except PlacementError as error:
            raise self.error(str(error)) from None

    def integer(self, name: str) -> int:
        """Returns a field that is one integer. Raises `FormatError`."""
        try:
            return numbers.parse_integer(name, self._field(name))
        except PlacementError as error:
            raise self.error(str(error)) from None

    def optional_integer(self, name: str) -> int | None:
        """Returns a field that is one integer; None if it is absent or null."""
        return None if self.fields.get(name) is None else self.integer(name)

    def layer_numbers(self) -> tuple[int, ...]:
        """Returns the numbers of the layers; empty if the file does not have them."""
        if "layers" not in self.fields:
            return ()
        return tuple(self.int64_array("layers", ("layer",)).tolist())

    def _field(self, name: str) -> object:
        if name not in self.fields:
            names = ", ".join(sorted(self.fields)[:8])
            raise self.error(f"has no field {name}, only {numbers.short_repr(names)}")
        return self.fields[name]


def decode_file(path: Path) -> DecodedFile:
    """Decodes a file by its suffix, else by its first bytes. Raises `FormatError`."""
    data = read_bytes(path)
    if not data:
        raise FormatError(str(path), "is empty")
    suffix = path.suffix.lower()
    if suffix not in DECODERS:
        suffixes = [kind for magic, kind in MAGIC_PREFIXES if data.lstrip().startswith(magic)]
        if not suffixes:
            kinds = ", ".join(DECODERS)
            raise FormatError(str(path), f"is of no kind that is known: {kinds}")
        suffix = suffixes[0]
    return DecodedFile(path, suffix, DECODERS[suffix](path, data))


def encode_fields(suffix: str, fields: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Encodes arrays by name as JSON, npz or safetensors, by `suffix`."""
    if suffix == ".npz":
        return encode_npz(dict(fields))
    if suffix == ".safetensors":
        return encode_safetensors(fields)
    return encode_json({name: array.tolist() for name, array in fields.items()})
