"""What an engine hands over, as the integers that the planner takes.

Engines pass tensors of floats. Floats that are whole numbers, which counts are, are taken as they
are. Others are multiplied by a power of two for each layer, so that the layer sums to less than
2^44, and rounded to the nearest integer: ratios to the largest keep
some 30 bits, more than float32 has.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from equipoise.balancer.experts.planning.inputs import MAX_LAYER_ROWS
from equipoise.hal.errors import PlacementError

ArrayInput: TypeAlias = torch.Tensor | npt.ArrayLike
"""A tensor on any device, an array of numpy, or lists."""
Counts: TypeAlias = npt.NDArray[np.int64]
SCALED_SUM_BITS = 44
"""A layer that has to be scaled sums to less than two to the power of so many."""
UNKNOWN = -1
"""What an engine writes for a slot that it has no count of, or that holds nothing."""


def to_host_array(given: ArrayInput) -> npt.NDArray[np.generic]:
    """On the host. Raises `PlacementError` where it is no array."""
    if isinstance(given, torch.Tensor):
        host = given.detach().cpu()
        return np.asarray(host.float().numpy() if host.dtype == torch.bfloat16 else host.numpy())
    try:
        return np.asarray(given)
    except ValueError as error:
        raise PlacementError(f"expected an array: {error}") from None


def integer_counts(weight: ArrayInput, name: str = "weight") -> Counts:
    """(layers, experts) or (windows, layers, experts) of any number type, as int64.

    Raises `PlacementError` for other shapes, and for what is negative or not finite.
    """
    given = to_host_array(weight)
    if given.ndim not in (2, 3) or 0 in given.shape:
        raise PlacementError(f"{name} must be (layers, experts), none of them 0, got {given.shape}")
    if given.dtype.kind not in "iuf":
        raise PlacementError(f"{name} must be numbers, got {given.dtype}")
    check_counts(given, name)
    numbers = given.astype(np.float64)
    if (numbers == np.rint(numbers)).all() and _fits(numbers):
        return given.astype(np.int64)
    return _scaled(numbers)


def check_counts(given: npt.NDArray[np.generic], name: str) -> None:
    """Raise `PlacementError` at the first number that is no count."""
    numbers = given.astype(np.float64)
    wrong = ~(np.isfinite(numbers) & (numbers >= 0))
    if not wrong.any():
        return
    place = np.unravel_index(int(wrong.argmax()), wrong.shape)
    where = ", ".join(str(int(part)) for part in place)
    raise PlacementError(f"{name}[{where}] is {numbers[place]:g}, which is no count")


def integer_ids(given: ArrayInput, name: str) -> Counts:
    """Ids as int64; raises `PlacementError` for anything but integers."""
    array = to_host_array(given)
    if array.dtype.kind not in "iu":
        raise PlacementError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def _fits(numbers: npt.NDArray[np.float64]) -> bool:
    """Whether the planner takes the sums of the layers."""
    by_layer = (
        np.minimum(numbers, MAX_LAYER_ROWS + 1).reshape(-1, *numbers.shape[-2:]).sum(axis=(0, 2))
    )
    return bool(by_layer.max() <= MAX_LAYER_ROWS)


def _scaled(numbers: npt.NDArray[np.float64]) -> Counts:
    """Powers of two only: they lose nothing but what is rounded at the end.

    By the largest number of a layer, not by its sum, which depends on the order of adding.
    """
    layers, experts = numbers.shape[-2:]
    largest = numbers.reshape(-1, layers, experts).max(axis=(0, 2))
    bits = (numbers.size // layers).bit_length()
    steps = np.where(largest > 0, SCALED_SUM_BITS - bits - np.frexp(largest)[1], 0)
    scaled: Counts = np.rint(np.ldexp(numbers, steps[:, None])).astype(np.int64)
    return scaled
