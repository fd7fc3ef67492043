"""What an exchange must bring, told rank by rank and choice by choice."""

from dataclasses import dataclass
from math import prod

import torch
from exploration.exchange.case import Case
from helpers.rank_programs.tensor_patterns import DTYPES, pattern
from torch import Tensor


def payload(case: Case, step: int, batch: int, rank: int, number: int) -> Tensor:
    """What a rank brings: [n, ...]."""
    shape, dtype = case.payloads[number]
    seed = 97 * step + 31 * batch + 7 * number
    return pattern(seed, rank, [len(case.steps[step][batch][rank]), *shape], dtype)


def loads(case: Case, step: int, batch: int, rank: int) -> Tensor:
    """The histogram of a rank, int32 [experts]: other numbers at every dispatch."""
    first = 1000 * step + 100 * batch + 10 * rank + 1
    return torch.arange(first, first + case.experts, dtype=torch.int32)


def expert(rows: list[Tensor], experts: Tensor, result: tuple[list[int], str]) -> Tensor:
    """What an expert makes of a token's rows, by entry: exact in every dtype.

    Args:
        rows: [entries, ...] by payload.
        experts: integers [entries].
        result: shape and dtype of what comes out.
    """
    total = experts.double()
    for each in rows:
        total = total + each.double().reshape(each.shape[0], prod(each.shape[1:])).sum(1)
    values = total[:, None] + torch.arange(prod(result[0]))
    return (values % 8).to(DTYPES[result[1]]).view(len(values), *result[0])


def dense(case: Case, step: int, batch: int, rank: int) -> Tensor:
    """What must come back, [n, top_k, ...]: no exchange, a loop over choices."""
    grid = torch.tensor(case.steps[step][batch][rank]).view(-1, case.top_k)
    rows = [payload(case, step, batch, rank, n) for n in range(len(case.payloads))]
    out = torch.zeros(len(grid), case.top_k, *case.result[0]).to(DTYPES[case.result[1]])
    for token, k in torch.cartesian_prod(torch.arange(len(grid)), torch.arange(case.top_k)):
        slot = int(grid[token, k])
        if 0 <= slot < case.slots and slot // case.per_rank in case.ranks:
            token_rows = [row[token : token + 1] for row in rows]
            experts = case.experts_of(grid[token, k : k + 1])
            out[token, k] = expert(token_rows, experts, case.result)[0]
    return out


@dataclass(frozen=True)
class Excess:
    """By how much the fullest message of a step is too full."""

    rows: int
    results: int


def excess(case: Case, step: int) -> Excess:
    """Counted choice by choice."""
    form = case.form()
    rows = results = 0
    for batch in case.steps[step]:
        for source in case.ranks:
            for peer in case.ranks:
                homes = [
                    sum(0 <= s < case.slots and s // case.per_rank == peer for s in token)
                    for token in batch[source]
                ]
                rows = max(rows, sum(h > 0 for h in homes) - form.capacity)
                results = max(results, sum(homes) - form.result_capacity)
    return Excess(rows, results)


def stray(case: Case, step: int, rank: int) -> int:
    """Choices of a rank that fall on ranks that take no part."""
    return sum(
        0 <= slot < case.slots and slot // case.per_rank not in case.ranks
        for batch in case.steps[step]
        for token in batch[rank]
        for slot in token
    )


def mismatched(case: Case, step: int) -> bool:
    """Whether ranks dispatched with several generations."""
    return any(
        len({case.generation(step, number, rank) for rank in case.ranks}) > 1
        for number in range(len(case.steps[step]))
    )
