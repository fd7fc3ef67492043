"""Collectives over ranks that have different numbers of rows; gloo knows them for equal ones."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def gather_rows(
    rows: torch.Tensor, counts: Sequence[int], group: ProcessGroup | None = None
) -> torch.Tensor:
    """Rows of all ranks in their order, (sum of `counts`, ...).

    Args:
        rows: (counts[rank], ...) of this rank; other dimensions and the dtype are the same on all.
        counts: rows by rank, the same on all.
        group: the ranks; all of them by default.
    """
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def scatter_sum(
    rows: torch.Tensor, counts: Sequence[int], rank: int, group: ProcessGroup | None = None
) -> torch.Tensor:
    """The sum over ranks of this rank's rows, (counts[rank], ...).

    Everything is summed everywhere: gloo does not scatter unequal parts.

    Args:
        rows: (sum of `counts`, ...) of every rank; unchanged.
        counts: rows that each rank is to have, the same on all.
        rank: this one's place in the group.
        group: the ranks; all of them by default.
    """
    total = rows.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    first = sum(counts[:rank])
    return total[first : first + counts[rank]].clone()
