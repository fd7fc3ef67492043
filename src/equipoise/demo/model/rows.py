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
GROUP_ROWS = 128
"""Rows of a group where a device needs groups: a GPU takes no longer for them than for eight, and
launches a sixteenth as often."""
_grouped: set[torch.device] = set()
"""Devices on which rows are computed `GROUP_ROWS` at a time."""


def padded_count(rows: int) -> int:
    """The next multiple of `ROW_MULTIPLE`; 0 stays 0."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_rows(x: Tensor, multiple: int = ROW_MULTIPLE) -> Tensor:
    """(n, width) -> (n rounded up to `multiple`, width), the new rows zero; `x` itself where none
    is new."""
    missing = -x.shape[0] % multiple
    if not missing:
        return x.contiguous()
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:])))


def group_rows(device: torch.device) -> None:
    """From now on compute rows there `GROUP_ROWS` at a time: a device that chooses its way by the
    number of rows is always given the same number. Slower, and only for comparisons to the bit."""
    _grouped.add(device)


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of rows, (n, ...) -> (n, ...), in groups where the device needs that."""
    if x.device not in _grouped or not x.shape[0]:
        return function(x)
    groups = torch.split(pad_rows(x, GROUP_ROWS), GROUP_ROWS)
    return torch.cat([function(group) for group in groups])[: x.shape[0]]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """(n, in) @ (in, out) in float32, n a multiple of `ROW_MULTIPLE`; the only dense product."""
    if x.shape[0] % ROW_MULTIPLE:
        raise ValueError(f"{x.shape[0]} rows are not a multiple of {ROW_MULTIPLE}")
    return by_rows(lambda rows: torch.mm(rows, weight), x)
