"""What a plan is made for: the load, and how it varies from window to window."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equipoise.balancer.experts.activity import Active
from equipoise.balancer.experts.choices import Objective, Policy, default_sigma
from equipoise.hal.errors import PlacementError

MOST = 2**46 - 1
"""Rows of a layer at most, as the native core counts them."""
DIMENSIONS = 2, 3
KEPT = 64
"""Windows that a covariance is taken over at most: more of them say little more, and take time."""


@dataclass(frozen=True)
class Demand:
    """What is asked of the experts.

    Attributes:
        load: int64 (layers, experts), summed over windows: rows, or batches that an expert runs in.
        windows: int64 (windows, layers, experts), of which the load is the sum; None where how it
            varies is not asked for, or not known.
        sigma: standard deviations over the windows that a rank counts with.
        active: bool (batches, layers, experts), which experts run; None where rows are planned for.
    """

    load: npt.NDArray[np.int64]
    windows: npt.NDArray[np.int64] | None = None
    sigma: float = 0.0
    active: Active | None = None


def demand_of(
    load: npt.ArrayLike, sigma: float | None, policy: Policy, objective: Objective
) -> Demand:
    """From counts (layers, experts) or (windows, layers, experts).

    Without `sigma` it is what `default_sigma` says.

    Where active experts are planned for, every window is a batch, and counts an expert once if it
    has any rows.

    Windows are kept where sigma asks for them; of more than `KEPT` neighbours are summed. Raises
    `PlacementError`.
    """
    windows, active = _windows(load), None
    if objective is Objective.ACTIVE_EXPERTS:
        if windows.shape[0] < 2:
            raise PlacementError("active_experts takes recorded routing (batches, layers, experts)")
        active = windows > 0
        windows = active.astype(np.int64)
    if sigma is None:
        sigma = default_sigma(windows.shape[0], policy, objective)
    if not 0.0 <= sigma <= 100.0:
        raise PlacementError(f"sigma must be 0 to 100, got {sigma:g}")
    # In floating point, which is exact up to far beyond that: integers might wrap around.
    if windows.sum(axis=(0, 2), dtype=np.float64).max() > MOST:
        raise PlacementError(f"a layer has more than {MOST} rows")
    total = windows.sum(axis=0)
    if sigma == 0.0 or windows.shape[0] == 1:
        return Demand(total, active=active)
    starts = np.unique(np.arange(KEPT) * windows.shape[0] // KEPT)
    return Demand(total, np.add.reduceat(windows, starts, axis=0), sigma, active)


def array_of(name: str, given: npt.ArrayLike) -> npt.NDArray[Any]:
    """As an array of numpy. Raises `PlacementError` for nested lists of unlike lengths."""
    try:
        return np.asarray(given)
    except (ValueError, OverflowError) as error:
        raise PlacementError(f"{name} is no array: {str(error)[:100]}") from None


def _windows(load: npt.ArrayLike) -> npt.NDArray[np.int64]:
    given = array_of("load", load)
    if given.ndim not in DIMENSIONS or 0 in given.shape:
        raise PlacementError(
            "load must be (layers, experts) or (windows, layers, experts), none of them 0, "
            f"got {given.shape}"
        )
    if given.dtype.kind not in "iu":
        raise PlacementError(f"load must be integers, got {given.dtype}")
    if given.max() > MOST:  # before a larger one turns negative
        raise PlacementError(f"a layer has more than {MOST} rows")
    windows = np.ascontiguousarray(given.reshape(-1, *given.shape[-2:]), dtype=np.int64)
    if windows.min() < 0:
        *_, layer, expert = np.unravel_index(int(given.argmin()), given.shape)
        raise PlacementError(
            f"load must not be negative: {given.min()} for expert {expert} in layer {layer}"
        )
    return windows
