"""Encodes and decodes npy, npz, safetensors, torch, JSON and YAML; bounds what a file can cost.

A file from elsewhere may be damaged or hostile, so sizes are checked before anything is allocated
and nothing is executed: no pickle, no object arrays, torch files with `weights_only`. JSON is read
strictly: a repeated key, a NaN or too deep nesting is an error. YAML is read as mappings, lists and
plain scalars; only decimal integers are numbers. Anchors are refused, since with them a small file
can expand to a vast one, and so are repeated keys, which the loader would drop silently.
"""

import json
import re
from collections.abc import Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
import numpy.typing as npt
import yaml
from safetensors.numpy import load, save

from equipoise.balancer.formats.files import MAX_FILE_BYTES, read_text
from equipoise.balancer.formats.numbers import short_repr
from equipoise.hal.errors import FormatError

Array = npt.NDArray[np.generic]
HEADER_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def decode_npy(path: Path, data: bytes, name: str = "array") -> Array:
    """Decodes one array of numbers.

    Raises `FormatError` if it is truncated, longer than its header says, or holds objects.
    """
    stream = BytesIO(data)
    shape, column_major, dtype = read_npy_header(path, stream, len(data), name)
    begin = stream.tell()
    flat: Array = np.frombuffer(data, dtype, offset=begin) if prod(shape) else np.zeros(0, dtype)
    # C order, whatever the order in the file: the native core takes no other.
    return np.ascontiguousarray(flat.reshape(shape, order="F" if column_major else "C"))


def read_npy_header(
    path: Path, stream: BinaryIO, size: int, name: str = "array"
) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Reads shape, whether columns come first, and dtype; the stream is then at the numbers.

    Raises `FormatError` unless the `size` bytes of the stream are the header and its numbers.
    """
    try:
        shape, column_major, dtype = HEADER_READERS[np.lib.format.read_magic(stream)](stream)
    except Exception as error:  # numpy's parser raises many types for a damaged header
        reason = str(error).partition("\n")[0][:80]
        raise FormatError(str(path), f"{name}: not an npy header: {reason}") from None
    if dtype.kind not in "iuf":
        raise FormatError(str(path), f"{name} holds {dtype}, not numbers")
    bytes_left = size - stream.tell()
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != bytes_left:
        raise FormatError(str(path), f"{name}: {bytes_left} bytes do not fill {dtype} {shape}")
    return shape, column_major, dtype


def encode_npy(array: Array) -> bytes:
    """Encodes an array as an .npy file."""
    stream = BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def decode_npz(path: Path, data: bytes) -> dict[str, Array]:
    """Decodes an .npz file to arrays by name. Raises `FormatError`."""
    members = unzip(path, data)
    return {
        name.removesuffix(".npy"): decode_npy(path, inner, name) for name, inner in members.items()
    }


def encode_npz(arrays: dict[str, Array]) -> bytes:
    """Encodes arrays as an .npz file; equal arrays give equal bytes."""
    stream = BytesIO()
    with ZipFile(stream, "w", ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            # `ZipInfo` dates a member 1980, so the bytes do not depend on the time of writing.
            archive.writestr(ZipInfo(f"{name}.npy"), encode_npy(array), ZIP_DEFLATED)
    return stream.getvalue()


def unzip(path: Path, data: bytes) -> dict[str, bytes]:
    """Returns the members of a zip archive by name, their CRCs checked. Raises `FormatError`."""
    try:
        with ZipFile(BytesIO(data)) as archive:
            # Before reading: a small archive can declare members of any size.
            if sum(member.file_size for member in archive.infolist()) > MAX_FILE_BYTES:
                raise FormatError(str(path), f"unpacks to more than {MAX_FILE_BYTES} bytes")
            return {member.filename: archive.read(member) for member in archive.infolist()}
    except FormatError:
        raise
    except Exception as error:  # zipfile and zlib raise many types for a damaged archive
        reason = str(error).partition("\n")[0][:80]
        raise FormatError(str(path), f"is not a whole zip archive: {reason}") from None


ZIP_MAGIC = b"PK\x03\x04"


def decode_safetensors(path: Path, data: bytes) -> dict[str, Array]:
    """Decodes a safetensors file to arrays by name. Raises `FormatError`."""
    try:
        return dict(load(data))
    except Exception as error:  # SafetensorError, or numpy's for dtypes that numpy lacks
        reason = str(error).partition("\n")[0][:80]
        raise FormatError(str(path), f"is not a whole safetensors file: {reason}") from None


def encode_safetensors(arrays: Mapping[str, Array]) -> bytes:
    """Encodes arrays by name as a safetensors file."""
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def decode_torch(path: Path, data: bytes) -> dict[str, object]:
    """Decodes a dictionary that `torch.save` wrote: tensors to arrays, other values as they are.

    Only tensors and plain values are read, by `weights_only`: a file that needs anything else could
    run code while it is read. Raises `FormatError`.
    """
    import torch  # here, since only this suffix needs it, and importing takes seconds

    if data.startswith(ZIP_MAGIC):
        unzip(path, data)  # for its checks: torch allocates the sizes that the archive declares
    try:
        loaded = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        problem = "is damaged, or holds more than tensors and plain values, which is not read since"
        raise FormatError(
            str(path), f"{problem} it could run code ({type(error).__name__})"
        ) from None
    if not isinstance(loaded, dict):
        raise FormatError(str(path), f"holds {type(loaded).__name__}, not a dictionary")
    return {
        str(key): array_of_tensor(path, str(key), value)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in loaded.items()
    }


def array_of_tensor(path: Path, name: str, tensor: object) -> Array:
    """Returns a plain tensor as an array. Raises `FormatError` for anything else."""
    from torch import Tensor

    if not isinstance(tensor, Tensor):
        raise FormatError(str(path), f"{name} is {short_repr(tensor)}, not a tensor")
    # With strides of 0, a few stored bytes can describe a tensor of any size.
    if tensor.numel() * 8 > MAX_FILE_BYTES:
        raise FormatError(str(path), f"{name} has {tensor.numel()} entries")
    try:
        plain = tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
        array: Array = plain.contiguous().numpy()
    except Exception as error:  # quantised, sparse, meta device
        reason = str(error).partition("\n")[0][:80]
        raise FormatError(str(path), f"{name} is no plain tensor: {reason}") from None
    return array


def decode_json(path: Path, data: bytes) -> dict[str, object]:
    """Decodes a JSON object. Raises `FormatError` that names line and column."""
    loaded = parse_json(path, data)
    if not isinstance(loaded, dict):
        raise FormatError(str(path), f"holds {short_repr(loaded)}, not an object")
    return loaded


def parse_json(path: Path, data: bytes, first_line: int = 1) -> object:
    """Decodes any JSON value. Raises `FormatError`; `first_line` is the line that `data` is at."""
    text = read_text(path, data)
    try:
        loaded: object = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        where = f"line {first_line + error.lineno - 1}, column {error.colno}"
        raise FormatError(str(path), f"is not JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise FormatError(str(path), "is not read: nested too deep") from None
    except ValueError as error:
        raise FormatError(str(path), f"is not JSON: {str(error)[:100]}") from None
    return loaded


def encode_json(fields: Mapping[str, object]) -> bytes:
    """Encodes a JSON object: one key per line, and one row per line of a list of rows."""
    lines = [f"  {json.dumps(key)}: {_json_value(value)}" for key, value in fields.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _json_value(value: object) -> str:
    if not isinstance(value, list) or not value or not isinstance(value[0], list | dict):
        return json.dumps(value)
    return "[\n    " + ",\n    ".join(json.dumps(row) for row in value) + "\n  ]"


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Builds an object; refuses repeated keys, of which the parser would keep the last."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {short_repr(twice)} is given twice")
    return fields


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number of JSON")


MAX_YAML_BYTES = 64 << 20
"""Enough for a thousand layers of ten thousand slots."""
MAX_YAML_DEPTH = 8
"""More than any format here nests; the composer recurses once per level."""
# The loader in C is ten times faster; PyYAML may have been built without it.
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
YAML_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")


def decode_yaml(path: Path, data: bytes) -> dict[str, object]:
    """Decodes a YAML mapping, with keys as strings. Raises `FormatError`."""
    if len(data) > MAX_YAML_BYTES:
        raise FormatError(str(path), f"is larger than {MAX_YAML_BYTES} bytes")
    text = read_text(path, data)
    try:
        _check_yaml_events(path, text)
        node = yaml.compose(text, Loader=YAML_LOADER)
    except yaml.YAMLError as error:
        raise FormatError(str(path), f"is not YAML: {_yaml_problem(error)}") from None
    loaded = _yaml_value(path, node)
    if not isinstance(loaded, dict):
        raise FormatError(str(path), f"holds {short_repr(loaded)}, not a mapping")
    return loaded


def encode_yaml(fields: Mapping[str, object]) -> bytes:
    """Encodes YAML with sorted keys and each list on one line, as the engines' own tools do."""
    text = ""
    for key, value in sorted(fields.items()):
        if isinstance(value, Mapping):
            rows = "".join(f"  {inner}: {row}\n" for inner, row in value.items())
            text += f"{key}:\n{rows}"
        else:
            text += f"{key}: {value}\n"
    return text.encode()


def _check_yaml_events(path: Path, text: str) -> None:
    """Refuses deep nesting and anchors, before the recursive composer sees the text."""
    depth = 0
    for event in yaml.parse(text, Loader=YAML_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise FormatError(
                str(path), f"refers to the anchor {short_repr(event.anchor)}: spell it out"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_YAML_DEPTH:
            raise FormatError(str(path), f"is not read: nested deeper than {MAX_YAML_DEPTH} levels")


def _yaml_value(path: Path, node: yaml.Node | None) -> object:
    if isinstance(node, yaml.MappingNode):
        return _yaml_mapping(path, node)
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(path, inner) for inner in node.value]
    if not isinstance(node, yaml.ScalarNode):
        return None
    if not node.style and YAML_INTEGER.fullmatch(node.value):
        return int(node.value)
    return None if node.value in ("", "~", "null") else node.value


def _yaml_mapping(path: Path, node: yaml.MappingNode) -> dict[str, object]:
    fields: dict[str, object] = {}
    for key, value in node.value:
        name = str(key.value)
        if name in fields:
            raise FormatError(str(path), f"key {short_repr(name)} is given twice")
        fields[name] = _yaml_value(path, value)
    return fields


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return str(error).partition("\n")[0]
