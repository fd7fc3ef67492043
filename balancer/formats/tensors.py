"""Arrays of safetensors files, and of torch's own files without running what they carry."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load, save

from equipoise.balancer.formats.files import LARGEST
from equipoise.balancer.formats.npy import Array, unzip
from equipoise.hal.errors import FormatError

if TYPE_CHECKING:
    from torch import Tensor

ZIP = b"PK\x03\x04"


def decode_safetensors(path: Path, data: bytes) -> dict[str, Array]:
    """Arrays by name. Raises `FormatError`."""
    try:
        return dict(load(data))
    except Exception as error:  # its own class, and numpy's for types that it lacks
        what = str(error).partition("\n")[0][:80]
        raise FormatError(str(path), f"is not a whole safetensors file: {what}") from None


def encode_safetensors(arrays: Mapping[str, Array]) -> bytes:
    """The bytes of a safetensors file."""
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def decode_torch(path: Path, data: bytes) -> dict[str, object]:
    """The dictionary that `torch.save` wrote: tensors as arrays, plain values as they are.

    Only tensors and plain values are read, by `weights_only`: a file that needs anything else
    could run code as it is read, so it is refused. Raises `FormatError`.
    """
    import torch  # only for this one suffix

    if data.startswith(ZIP):
        unzip(path, data)  # torch would believe the sizes that the archive declares
    try:
        loaded = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        what = "is damaged, or holds more than tensors and plain values, which is not read since"
        raise FormatError(str(path), f"{what} it could run code ({type(error).__name__})") from None
    if not isinstance(loaded, dict):
        raise FormatError(str(path), f"holds {type(loaded).__name__}, not a dictionary")
    return {
        str(key): _array(path, str(key), value) if isinstance(value, torch.Tensor) else value
        for key, value in loaded.items()
    }


def _array(path: Path, name: str, tensor: "Tensor") -> Array:
    # A damaged or sly file may describe a few bytes as a vast tensor of repeated ones.
    if tensor.numel() * 8 > LARGEST:
        raise FormatError(str(path), f"{name} has {tensor.numel()} entries")
    try:
        plain = tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
        array: Array = plain.contiguous().numpy()
    except Exception as error:  # quantised, sparse, on no device
        what = str(error).partition("\n")[0][:80]
        raise FormatError(str(path), f"{name} is no plain tensor: {what}") from None
    return array
