"""Arrays of numpy's own files, decoded with the size checked before anything is allocated.

Never with pickle: an array of objects is refused.
"""

from io import BytesIO
from math import prod
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
import numpy.typing as npt

from equipoise.balancer.formats.files import LARGEST
from equipoise.hal.errors import FormatError

Array = npt.NDArray[np.generic]
HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def decode_npy(path: Path, data: bytes, name: str = "array") -> Array:
    """One array of numbers. Raises `FormatError`: truncated, longer than it says, objects."""
    stream = BytesIO(data)
    try:
        shape, column_major, dtype = HEADERS[np.lib.format.read_magic(stream)](stream)
    except Exception as error:  # whatever the parser says, the file is at fault
        what = str(error).partition("\n")[0][:80]
        raise FormatError(str(path), f"{name}: not an npy header: {what}") from None
    if dtype.kind not in "iuf":
        raise FormatError(str(path), f"{name} holds {dtype}, not numbers")
    begin = stream.tell()
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != len(data) - begin:
        raise FormatError(
            str(path), f"{name}: {len(data) - begin} bytes do not fill {dtype} {shape}"
        )
    flat: Array = np.frombuffer(data, dtype, offset=begin) if prod(shape) else np.zeros(0, dtype)
    # As rows, whatever the order in the file: the native core takes no other.
    return np.ascontiguousarray(flat.reshape(shape, order="F" if column_major else "C"))


def encode_npy(array: Array) -> bytes:
    """The bytes of an .npy file."""
    stream = BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def decode_npz(path: Path, data: bytes) -> dict[str, Array]:
    """Arrays by name. Raises `FormatError`."""
    members = unzip(path, data)
    return {
        name.removesuffix(".npy"): decode_npy(path, inner, name) for name, inner in members.items()
    }


def encode_npz(arrays: dict[str, Array]) -> bytes:
    """The bytes of an .npz file, the same for the same arrays."""
    stream = BytesIO()
    with ZipFile(stream, "w", ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            # Members are of 1980: the bytes do not tell when they were written.
            archive.writestr(ZipInfo(f"{name}.npy"), encode_npy(array), ZIP_DEFLATED)
    return stream.getvalue()


def unzip(path: Path, data: bytes) -> dict[str, bytes]:
    """Members of a zip archive by name, their sums checked. Raises `FormatError`."""
    try:
        with ZipFile(BytesIO(data)) as archive:
            if sum(member.file_size for member in archive.infolist()) > LARGEST:
                raise FormatError(str(path), f"unpacks to more than {LARGEST} bytes")
            return {member.filename: archive.read(member) for member in archive.infolist()}
    except FormatError:
        raise
    except Exception as error:  # zip, zlib, and the many ways in which both can be damaged
        what = str(error).partition("\n")[0][:80]
        raise FormatError(str(path), f"is not a whole zip archive: {what}") from None
