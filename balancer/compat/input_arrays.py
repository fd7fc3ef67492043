"""Converts the arrays that engines pass to the integers that the planner takes.

Engines pass tensors of floats. If all values are integers, as counts are, they are used as they
are. Otherwise each layer is multiplied by a power of two, so that it sums to less than 2^44, and
rounded to the nearest integer: ratios to the largest value keep about 30 bits, more than float32
has.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from equipoise.balancer.experts.planning.inputs import MAX_LAYER_ROWS
from equipoise.hal.errors import PlacementError

ArrayInput: TypeAlias = torch.Tensor | npt.ArrayLike
"""A tensor on any device, a numpy array, or nested lists."""
Counts: TypeAlias = npt.NDArray[np.int64]
SCALED_SUM_BITS = 44
"""A layer that has to be scaled sums to less than 2 to this power: the planner takes below 2^46."""
UNKNOWN_COUNT = -1
"""An engine's value for a slot without a count, or without an expert."""


def to_host_array(array: ArrayInput) -> npt.NDArray[np.generic]:
    """Copies to a numpy array on the host. Raises `PlacementError` if it is no array."""
    if isinstance(array, torch.Tensor):
        host = array.detach().cpu()
        return np.asarray(host.float().numpy() if host.dtype == torch.bfloat16 else host.numpy())
    try:
        return np.asarray(array)
    except ValueError as error:
        raise PlacementError(f"expected an array: {error}") from None


def integer_counts(weight: ArrayInput, name: str = "weight") -> Counts:
    """Converts (layers, experts) or (windows, layers, experts) of any numeric dtype to int64.

    Raises `PlacementError` for other shapes, and for negative or non-finite values.
    """
    array = to_host_array(weight)
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise PlacementError(f"{name} must be (layers, experts), none of them 0, got {array.shape}")
    if array.dtype.kind not in "iuf":
        raise PlacementError(f"{name} must be numbers, got {array.dtype}")
    check_counts(array, name)
    numbers = array.astype(np.float64)
    if (numbers == np.rint(numbers)).all() and _fits(numbers):
        return array.astype(np.int64)
    return _scale_layers(numbers)


def check_counts(array: npt.NDArray[np.generic], name: str) -> None:
    """Raises `PlacementError` that names the first value which is not a count."""
    numbers = array.astype(np.float64)
    wrong = ~(np.isfinite(numbers) & (numbers >= 0))
    if not wrong.any():
        return
    index = np.unravel_index(int(wrong.argmax()), wrong.shape)
    position = ", ".join(str(int(part)) for part in index)
    raise PlacementError(f"{name}[{position}] is {numbers[index]:g}, which is no count")


def integer_ids(ids: ArrayInput, name: str) -> Counts:
    """Converts ids to int64. Raises `PlacementError` for other than integers."""
    array = to_host_array(ids)
    if array.dtype.kind not in "iu":
        raise PlacementError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def _fits(numbers: npt.NDArray[np.float64]) -> bool:
    """Returns whether the sums of all layers are within the planner's limit."""
    by_layer = (
        np.minimum(numbers, MAX_LAYER_ROWS + 1).reshape(-1, *numbers.shape[-2:]).sum(axis=(0, 2))
    )
    return bool(by_layer.max() <= MAX_LAYER_ROWS)


def _scale_layers(numbers: npt.NDArray[np.float64]) -> Counts:
    """Scales each layer by a power of two and rounds."""
    # A power of two is exact, so only the final rounding loses bits. It follows from the largest
    # value of a layer, not from its sum: a float sum depends on the order of adding, and all ranks
    # have to compute the same integers.
    layers, experts = numbers.shape[-2:]
    largest = numbers.reshape(-1, layers, experts).max(axis=(0, 2))
    bits = (numbers.size // layers).bit_length()
    steps = np.where(largest > 0, SCALED_SUM_BITS - bits - np.frexp(largest)[1], 0)
    counts: Counts = np.rint(np.ldexp(numbers, steps[:, None])).astype(np.int64)
    return counts
