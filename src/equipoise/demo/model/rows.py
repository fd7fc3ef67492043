"""Row groups of one size class, so that a row's result does not depend on its company.

A matrix product may take another path for few rows (one row is a matrix-vector product), and
another path may round otherwise. So every product sees a multiple of `ROW_MULTIPLE` rows and a
right-hand side stored [in, out]; `equipoise.demo.model.invariance` checks at start-up that this
is enough on the processor at hand.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ROW_MULTIPLE = 8
_grouped: set[torch.device] = set()
"""Devices on which rows are computed `ROW_MULTIPLE` at a time."""


def padded_count(rows: int) -> int:
    """The next multiple of `ROW_MULTIPLE`; 0 stays 0."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_rows(x: Tensor) -> Tensor:
    """(n, width) -> (padded_count(n), width), the new rows zero; `x` itself where none is new."""
    missing = -x.shape[0] % ROW_MULTIPLE
    if not missing:
        return x.contiguous()
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


def group_rows(device: torch.device) -> None:
    """From now on compute rows there `ROW_MULTIPLE` at a time: a device that chooses its way by the
    number of rows is always given the same number. Slower, and only for comparisons to the bit."""
    _grouped.add(device)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of rows, (n, ...) -> (n, ...), in groups where the device needs that."""
    if x.device not in _grouped or x.shape[0] <= ROW_MULTIPLE:
        return function(x)
    return torch.cat([function(part) for part in torch.split(x, ROW_MULTIPLE)])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """(n, in) @ (in, out) in float32, n a multiple of `ROW_MULTIPLE`; the only dense product."""
    if x.shape[0] % ROW_MULTIPLE:
        raise ValueError(f"{x.shape[0]} rows are not a multiple of {ROW_MULTIPLE}")
    return by_rows(lambda rows: torch.mm(rows, weight), x)
