"""Shares for kernels that know only lists of replicas.

Such a kernel takes an entry of an expert's list by a hash, or in turn, so that what stands in the
list more often takes more. A list of 64 or 128 entries holds every replica in proportion to its
share, by largest remainder (ties: lower slot): none is off by as much as one entry.

The order matters, because few tokens visit few entries. Entry j of a list is the one at
(j * step) mod width of the line in which equal entries stand together. As the step is close to
width / golden ratio, entries that are visited one after the other spread over the line. A whole
round through the list, by any stride, divides its visits among the replicas as evenly as whole
numbers do. A piece of a round by stride 1 (in turn) or 57 (what vLLM's hash makes of such a list)
is off by at most three, and no other step does better: the search is in
`tests/unit/balancer/experts/test_share_lists.py`.
"""

import numpy as np
import numpy.typing as npt

from equipoise import _native
from equipoise.balancer.experts.logical_maps import ABSENT, Maps, logical_maps
from equipoise.balancer.experts.placement import Placement, Shares
from equipoise.hal.errors import PlacementError

STEPS = {64: 39, 128: 79}
"""By width, the distance on the line from one entry to the next."""
Lists = npt.NDArray[np.int32]


def share_lists(placement: Placement, shares: Shares, experts: int, width: int) -> Lists:
    """Of each expert a list of slots, int32 (layers, experts, width).

    A replica whose share is below 1 / width may be left out.

    Raises:
        PlacementError: the width is neither 64 nor 128, an expert has no slot, or its shares do
            not sum to 65536.
    """
    if width not in STEPS:
        raise PlacementError(f"a list has 64 or 128 entries, not {width}")
    order = (np.arange(width, dtype=np.int32) * np.int32(STEPS[width])) % np.int32(width)
    lists = np.empty((placement.shape[0], experts, width), dtype=np.int32)
    try:
        _native.fill_lists(placement, shares, order, lists)
    except ValueError as error:
        raise PlacementError(str(error)) from error
    return lists


def share_maps(placement: Placement, shares: Shares, experts: int, width: int) -> Maps:
    """The maps that vLLM's kernel reads, by which its hash keeps the shares.

    The list of an expert whose shares are even, one replica included, is its slots as vLLM lists
    them, so that the kernel does what it always did; any other is its `share_lists` of `width`.

    Returns:
        `slots` (layers, experts, longest list instead of the 1024 columns that vLLM sets aside),
        then -1; `counts` how long each list is.

    Raises:
        PlacementError: as `share_lists`.
    """
    lists = share_lists(placement, shares, experts, width)
    plain = logical_maps(placement, experts)
    uneven = _uneven(placement, shares, experts, plain.counts)
    counts = np.where(uneven, width, plain.counts)
    longest = int(counts.max())
    slots = np.full((*counts.shape, longest), ABSENT, dtype=np.int64)
    columns = min(plain.slots.shape[2], longest)
    slots[..., :columns] = plain.slots[..., :columns]
    slots[uneven] = ABSENT
    # Where any are uneven there are at least `width` columns.
    slots[uneven, :width] = lists[uneven][:, :longest]
    return Maps(slots, counts)


def _uneven(
    placement: Placement, shares: Shares, experts: int, copies: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """(layers, experts): whose shares differ by more than rounding makes them."""
    layers = np.arange(placement.shape[0])[:, None]
    low = np.full(copies.shape, np.iinfo(np.int32).max, dtype=np.int32)
    high = np.zeros(copies.shape, dtype=np.int32)
    np.minimum.at(low, (layers, placement), shares)
    np.maximum.at(high, (layers, placement), shares)
    return high - low > 1
