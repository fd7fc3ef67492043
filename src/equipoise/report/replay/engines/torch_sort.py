"""The order in which torch's sort on the CPU leaves equal keys, which plans depend on.

Without `stable=True` torch 2.13 sorts a row by `std::sort`. Equal keys then stand in an order that
only the algorithm of libstdc++ explains (bits/stl_algo.h, bits/stl_heap.h): quicksort with the
median of three as pivot, down to pieces of 16, heapsort where the depth exceeds 2 log2(n), and one
insertion sort in the end. It is the same for every instruction set that torch dispatches to.
"""

import numpy as np
import numpy.typing as npt

PIECE = 16
"""Pieces of this length or less are left to the insertion sort (`_S_threshold`)."""


def argsort_descending(keys: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Returns the indices of `torch.sort(keys, dim=-1, descending=True)` for (rows, items)."""
    order = np.argsort(-keys, axis=-1, kind="stable")
    if keys.shape[-1] > PIECE:
        ordered = np.take_along_axis(keys, order, axis=-1)
        for row in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1)):
            order[row] = _introsort(-keys[row])
    return order


def _introsort(keys: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Returns the order in which `std::sort` leaves one row, ascending."""
    partitioned = _Row(keys.tolist())
    partitioned.quicksort(0, len(keys), 2 * (len(keys).bit_length() - 1))
    order = np.array(partitioned.order)
    # The insertion sort puts an element behind its equals: a stable sort of what is left.
    return order[np.argsort(keys[order], kind="stable")]


class _Row:
    """A row while it is sorted: `order` holds indices of `keys`.

    Args:
        keys: of the row.
    """

    def __init__(self, keys: list[float]) -> None:
        self.keys = keys
        self.order = list(range(len(keys)))

    def quicksort(self, first: int, end: int, depth: int) -> None:
        """Partitions [first, end) down to pieces that the insertion sort finishes."""
        while end - first > PIECE:
            if depth == 0:
                self.heapsort(first, end)
                return
            depth -= 1
            cut = self._partition(first, end)
            self.quicksort(cut, end, depth)
            end = cut

    def _partition(self, first: int, end: int) -> int:
        keys, order = self.keys, self.order
        low, middle, high = first + 1, first + (end - first) // 2, end - 1
        a, b, c = (keys[order[place]] for place in (low, middle, high))
        if a < b:
            median = middle if b < c else high if a < c else low
        else:
            median = low if a < c else high if b < c else middle
        order[first], order[median] = order[median], order[first]
        pivot, left, right = keys[order[first]], low, end
        while True:
            while keys[order[left]] < pivot:
                left += 1
            right -= 1
            while pivot < keys[order[right]]:
                right -= 1
            if left >= right:
                return left
            order[left], order[right] = order[right], order[left]
            left += 1

    def heapsort(self, first: int, end: int) -> None:
        """Sorts [first, end)."""
        heap = self.order[first:end]
        size = len(heap)
        for parent in range((size - 2) // 2, -1, -1):
            self._sift(heap, parent, size, heap[parent])
        for last in range(size - 1, 0, -1):
            element, heap[last] = heap[last], heap[0]
            self._sift(heap, 0, last, element)
        self.order[first:end] = heap

    def _sift(self, heap: list[int], hole: int, size: int, element: int) -> None:
        """Moves the hole to a leaf along the larger children, and the element up from there."""
        keys, top, child = self.keys, hole, hole
        while child < (size - 1) // 2:
            child = 2 * (child + 1)
            if keys[heap[child]] < keys[heap[child - 1]]:
                child -= 1
            heap[hole], hole = heap[child], child
        if size % 2 == 0 and child == (size - 2) // 2:
            child = 2 * child + 1
            heap[hole], hole = heap[child], child
        while hole > top and keys[heap[(hole - 1) // 2]] < keys[element]:
            heap[hole], hole = heap[(hole - 1) // 2], (hole - 1) // 2
        heap[hole] = element
