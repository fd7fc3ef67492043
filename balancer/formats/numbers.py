"""Converts the values in files (nested lists, arrays of any numeric type) to integers."""

from collections.abc import Sequence
from reprlib import Repr

import numpy as np
import numpy.typing as npt

from equipoise.hal.errors import PlacementError

MAX_LAYERS = 1 << 16
"""Upper limit of layer numbers, far above any model: writing some formats takes memory for each."""
INT64_LIMIT = 1 << 63
_SHORT = Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 40


def short_repr(value: object) -> str:
    """Returns a short text of a value for an error message."""
    return _SHORT.repr(value)


def format_index(axes: Sequence[str], index: Sequence[int], layers: Sequence[int] = ()) -> str:
    """Formats an index as `layer 3, expert 5`; `layers` maps the axis `layer` to layer numbers."""
    names = []
    for axis, at in zip(axes, index, strict=False):
        number = layers[at] if axis == "layer" and layers else at
        names.append(f"{axis} {number}")
    return ", ".join(names)


def int64_array(name: str, value: object, axes: Sequence[str]) -> npt.NDArray[np.int64]:
    """Converts an array, or nested lists, with these axes to int64.

    Raises `PlacementError` that names index and value if it has other axes, is ragged, or holds
    what is not a finite integer of 64 bits.
    """
    if isinstance(value, np.ndarray):
        return _from_array(name, value, axes)
    return _NestedLists(name, axes).array(value)


def int32_array(
    name: str, numbers: npt.NDArray[np.int64], axes: Sequence[str]
) -> npt.NDArray[np.int32]:
    """Converts to int32. Raises `PlacementError` for a value that does not fit."""
    wrong = np.argwhere(numbers != numbers.astype(np.int32))
    if wrong.size:
        position = tuple(wrong[0].tolist())
        raise PlacementError(
            f"{name}: {format_index(axes, position)}: {numbers[position]} is out of range"
        )
    return numbers.astype(np.int32)


def parse_integer(name: str, value: object) -> int:
    """Converts to one integer. Raises `PlacementError`."""
    if isinstance(value, np.ndarray):
        value = value.item() if value.size == 1 else value
    return _check_integer(value, f"{name} is")


def _check_integer(value: object, subject: str) -> int:
    if type(value) is float and value.is_integer() and abs(value) < INT64_LIMIT:
        return int(value)
    if type(value) is not int:
        raise PlacementError(f"{subject} {short_repr(value)}, not a whole number")
    if not -INT64_LIMIT <= value < INT64_LIMIT:
        raise PlacementError(f"{subject} {short_repr(value)}, beyond 64 bits")
    return value


def _from_array(
    name: str, array: npt.NDArray[np.generic], axes: Sequence[str]
) -> npt.NDArray[np.int64]:
    if array.ndim != len(axes):
        raise PlacementError(f"{name} is of shape {array.shape}, expected axes {', '.join(axes)}")
    if array.dtype.kind not in "iuf":
        raise PlacementError(f"{name} holds {array.dtype}, not numbers")
    wrong = np.argwhere(~_fits(array))
    if wrong.size:
        position = tuple(wrong[0].tolist())
        _check_integer(array[position].item(), f"{name}: {format_index(axes, position)} is")
    return array.astype(np.int64)


def _fits(array: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """Returns which values are integers of 64 bits."""
    if array.dtype.kind == "i":
        return np.ones(array.shape, dtype=np.bool_)
    if array.dtype.kind == "u":
        return array.astype(np.uint64) < np.uint64(INT64_LIMIT)
    # 2^63 is exact as a float, so the comparison is too; -2^63 as a float is refused with it.
    with np.errstate(invalid="ignore"):
        values = array.astype(np.float64)
        fits: npt.NDArray[np.bool_] = (abs(values) < float(INT64_LIMIT)) & (
            np.floor(values) == values
        )
    return fits


class _NestedLists:
    """Flattens nested lists in one pass and checks their lengths on each axis."""

    def __init__(self, name: str, axes: Sequence[str]) -> None:
        self._name = name
        self._axes = axes
        self._lengths: list[int | None] = [None] * len(axes)
        self._flat: list[int] = []

    def array(self, value: object) -> npt.NDArray[np.int64]:
        """Returns the lists as an int64 array."""
        self._walk(value, ())
        shape = [length or 0 for length in self._lengths]
        return np.array(self._flat, dtype=np.int64).reshape(shape)

    def _walk(self, value: object, index: tuple[int, ...]) -> None:
        if not isinstance(value, list):
            raise PlacementError(
                f"{self._describe_index(index)} is {short_repr(value)}, not a list"
            )
        expected = self._lengths[len(index)]
        if expected is None:
            self._lengths[len(index)] = len(value)
        elif expected != len(value):
            raise PlacementError(
                f"{self._describe_index(index)} has {len(value)} entries, expected {expected}"
            )
        if len(index) + 1 == len(self._axes):
            self._numbers(value, index)
            return
        for at, inner in enumerate(value):
            self._walk(inner, (*index, at))

    def _numbers(self, row: list[object], index: tuple[int, ...]) -> None:
        # Most files hold only valid integers: the text of an index is built only for others.
        for at, value in enumerate(row):
            if type(value) is int and -INT64_LIMIT <= value < INT64_LIMIT:
                self._flat.append(value)
            else:
                self._flat.append(_check_integer(value, f"{self._describe_index((*index, at))} is"))

    def _describe_index(self, index: tuple[int, ...]) -> str:
        return ": ".join(filter(None, (self._name, format_index(self._axes, index))))
